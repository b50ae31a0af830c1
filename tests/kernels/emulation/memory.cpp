// Which memory a thread of a kernel may touch, and races in shared memory.
#include "emulation.h"

namespace emulation {

const Range* ranges = nullptr;
int range_count = 0;
char* watched = nullptr;
size_t watched_bytes = 0;

int likely = 0;  // the range of the last access

void check(const void* address, size_t bytes, bool writing) {
  const char* at = static_cast<const char*>(address);
  if (reinterpret_cast<uintptr_t>(at) % bytes) fail("an address is not aligned to " + std::to_string(bytes) + " bytes");
  for (int i = 0; i < range_count; ++i, ++likely) {
    const Range& range = ranges[likely %= range_count];
    if (at < range.begin || at + bytes > range.end) continue;
    if (writing && !range.writable) fail("a write to an input");
    return;
  }
  fail(writing ? "a write outside the buffers" : "a read outside the buffers");
}

void check_shared(const void* address, size_t bytes) {
  const char* at = static_cast<const char*>(address);
  if (reinterpret_cast<uintptr_t>(at) % bytes) fail("a shared address is not aligned");
  if (at < current->cta->base || at + bytes > current->cta->base + shared_bytes)
    fail("an address outside shared memory");
}

// ---- races in shared memory

// When two bytes were last written, or read since. All threads of a CTA pass the same barriers, so counts
// tell whether one lies between two accesses.
struct Access {
  int16_t cta;           // its rank in the cluster, or SEVERAL
  int16_t thread;        // its number in the cluster, or SEVERAL
  uint16_t next;         // the CTA's next barrier then, from 1 on; 0: there was no access
  uint16_t arrivals;     // at the cluster's barrier until then
};
struct Shadow { Access write, read; };

constexpr int16_t SEVERAL = -1;
constexpr Access UNDER_WAY = {SEVERAL, SEVERAL, 0xFFFF, 0xFFFF};  // a copy that has not been waited for
std::vector<Pack> memory = {};    // of all CTAs of the cluster, a guard behind each
std::vector<Shadow> shadow = {};  // of each two bytes
Shadow* shadows = nullptr;

Access access_now(bool by_warp) {
  const Fiber& now = *current;
  return {int16_t(now.cta->rank), by_warp ? SEVERAL : int16_t(now.number()), uint16_t(now.cta->barriers + 1),
          uint16_t(now.arrivals)};
}

// Whether an arrival that hands over lies between an access and what the fiber has awaited.
bool handed_over(const Access& then) {
  const std::vector<bool>& relaxed = current->cta->cluster->relaxed;
  for (size_t arrival = then.arrivals; arrival < current->awaited; ++arrival)
    if (!relaxed[arrival]) return true;
  return false;
}

bool happened_before(const Access& then, const Access& now) {
  return then.next == 0 || (then.thread == now.thread && then.thread != SEVERAL) ||
         (then.cta == now.cta && then.next < now.next) || handed_over(then);
}

Access both(const Access& one, const Access& other) {
  return {one.cta == other.cta ? one.cta : SEVERAL, SEVERAL, one.next > other.next ? one.next : other.next,
          one.arrivals > other.arrivals ? one.arrivals : other.arrivals};
}

// Notes an access, and fails where another thread's is neither before nor behind it. What ldmatrix reads
// goes to other lanes than the one that gives the address: a whole warp reads it.
void note(const char* at, size_t bytes, bool writing, bool by_warp) {
  const size_t first = size_t(at - watched) / 2, last = (size_t(at - watched) + bytes - 1) / 2;
  const Access now = access_now(by_warp);
  for (size_t i = first; i <= last; ++i) {
    Shadow& shadow = shadows[i];
    if (!happened_before(shadow.write, now)) fail(writing ? "a race of two writes" : "a race of a write and a read");
    if (!writing) shadow.read = happened_before(shadow.read, now) ? now : both(shadow.read, now);
    else if (!happened_before(shadow.read, now)) fail("a race of a read and a write");
    else shadow = {now, {}};
  }
}

// Any access to any memory: only that to shared memory is of interest.
void touch(const void* address, size_t bytes, bool writing) {
  const char* at = static_cast<const char*>(address);
  if (size_t(at - watched) >= watched_bytes) return;
  if (at < current->cta->base || at + bytes > current->cta->base + shared_bytes) fail("an address outside shared memory");
  note(at, bytes, writing, false);
}

// A copy may land at any time from here until it is waited for.
void start_copy(const char* to) {
  note(to, 16, true, false);
  std::fill_n(shadows + (to - watched) / 2, 8, Shadow{UNDER_WAY, {}});
}

void land_copy(char* to, const void* from) {
  std::fill_n(shadows + (to - watched) / 2, 8, Shadow{});
  note(to, 16, true, false);
  if (from) std::memcpy(to, from, 16);
  else std::memset(to, 0, 16);
}

void poison_memory(size_t bytes) {
  memory.resize(std::max(memory.size(), bytes / sizeof(Pack)));
  shadow.resize(std::max(shadow.size(), bytes / 2));
  std::memset(memory.data(), POISON, bytes);
  std::memset(shadow.data(), 0, bytes / 2 * sizeof(Shadow));
  watched = reinterpret_cast<char*>(memory.data());
  shadows = shadow.data();
}

}  // namespace emulation

// ---- what g++ -fsanitize=thread calls at each access to memory

#define WATCH(bytes) \
  extern "C" void __tsan_read##bytes(void* at) { emulation::touch(at, bytes, false); } \
  extern "C" void __tsan_write##bytes(void* at) { emulation::touch(at, bytes, true); } \
  extern "C" void __tsan_unaligned_read##bytes(void* at) { emulation::touch(at, bytes, false); } \
  extern "C" void __tsan_unaligned_write##bytes(void* at) { emulation::touch(at, bytes, true); }
WATCH(1)
WATCH(2)
WATCH(4)
WATCH(8)
WATCH(16)
extern "C" void __tsan_read_range(void* at, size_t bytes) { emulation::touch(at, bytes, false); }
extern "C" void __tsan_write_range(void* at, size_t bytes) { emulation::touch(at, bytes, true); }
extern "C" void __tsan_vptr_update(void*, void*) {}
extern "C" void __tsan_init() {}
