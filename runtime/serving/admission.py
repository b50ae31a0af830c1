"""SHIM."""
from dataclasses import dataclass, field
from trt_lora.plugins.errors import StateError, LoRAError
@dataclass
class Scheduled:
    joined: list = field(default_factory=list)
    preempted: list = field(default_factory=list)
    failed: list = field(default_factory=list)
class AdmissionPolicy:
    def __init__(self, adapters, config=None):
        self.a=adapters; self.w={}; self.r={}; self.steps=0
    @property
    def waiting(self): return len(self.w)
    @property
    def running(self): return list(self.r.values())
    @property
    def leases(self): return [s.lease for s in self.r.values() if s.lease]
    def submit(self,s):
        if s.adapter is not None: self.a.generation(s.adapter)
        s.arrival=self.steps; self.w[s.id]=s
    def schedule(self, free):
        self.steps+=1
        out=Scheduled()
        for s in sorted(self.w.values(), key=lambda s:s.id):
            if free==0: break
            if s.lease is None and s.adapter is not None:
                try: s.lease=self.a.lease(s.adapter, expected_generation=s.generation)
                except StateError as e:
                    if s.generation not in (None, self.a.generation(s.adapter)):
                        out.failed.append((s,e)); del self.w[s.id]
                    continue
                except LoRAError as e:
                    out.failed.append((s,e)); del self.w[s.id]; continue
            del self.w[s.id]; self.r[s.id]=s; out.joined.append(s); free-=1
        return out
    def end(self,s):
        if self.w.pop(s.id,None) is None and self.r.pop(s.id,None) is None: raise StateError('no')
    def preempt(self,s):
        del self.r[s.id]
        if s.lease is not None and s.answer: s.generation=s.lease.generation
        self.w[s.id]=s
    def check_integrity(self): pass
