// CUDA intrinsics and inline PTX behind portable names. tests/kernels/emulation/emulation.h has the same for a CPU, so
// that the kernels, which follow this file in the compiled text, are one text for both.

struct Float16 { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
struct alignas(16) Pack { unsigned word[4]; };  // what one load of 16 bytes brings
struct alignas(16) Four { float value[4]; };

#define DEVICE __device__ __forceinline__

// The CTAs of a cluster share a shrink through each other's shared memory; before sm_90 each does it alone.
#if __CUDA_ARCH__ >= 900
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

DEVICE unsigned char* shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}

DEVICE float widen(float value) { return value; }
DEVICE float widen(BFloat16 value) { return __uint_as_float(unsigned(value.bits) << 16); }
DEVICE float widen(Float16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}

DEVICE void round_to(float& to, float value) { to = value; }
DEVICE void round_to(BFloat16& to, float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(value)); }
DEVICE void round_to(Float16& to, float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(value)); }

DEVICE unsigned bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(unsigned bits) { return __uint_as_float(bits); }

// The low, or the high, 16 bits of both.
DEVICE unsigned low_halves(unsigned first, unsigned second) { return __byte_perm(first, second, 0x5410); }
DEVICE unsigned high_halves(unsigned first, unsigned second) { return __byte_perm(first, second, 0x7632); }

// Has a value computed here, once, where the compiler would do it again in each branch that uses it.
template <class T> DEVICE void compute_here(T*& pointer) { asm volatile("" : "+l"(pointer)); }
DEVICE void compute_here(int& value) { asm volatile("" : "+r"(value)); }

// Memory that nobody writes while the kernel runs.
template <class T> DEVICE T read(const T* from) { return *from; }
DEVICE float read(const float* from) { return __ldg(from); }
DEVICE Float16 read(const Float16* from) { return {__ldg(&from->bits)}; }
DEVICE BFloat16 read(const BFloat16* from) { return {__ldg(&from->bits)}; }
DEVICE Pack read16(const void* from) {
  const uint4 words = __ldg(static_cast<const uint4*>(from));
  return {{words.x, words.y, words.z, words.w}};
}

template <class T> DEVICE void write(T* to, T value) { *to = value; }
DEVICE void write16(void* to, Pack pack) {
  *static_cast<uint4*>(to) = make_uint4(pack.word[0], pack.word[1], pack.word[2], pack.word[3]);
}

// Asks for the line of an address; it is in the level-2 cache when a later load wants it.
DEVICE void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// A bit for each lane of the warp whose value is the same.
DEVICE unsigned lanes_with(int value) { return __match_any_sync(0xffffffffu, value); }
DEVICE int of_lane(int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }

DEVICE unsigned shared_address(const void* pointer) { return unsigned(__cvta_generic_to_shared(pointer)); }

#if __CUDA_ARCH__ >= 900
DEVICE int cluster_rank() { int rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)); return rank; }
DEVICE constexpr int cluster_size() { return CLUSTER; }
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
// Orders no memory: for where nothing is handed over.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
DEVICE float read_remote(const float* mine, int rank) {
  unsigned theirs;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(theirs) : "memory");
  return value;
}
DEVICE Four read_remote(const Four* mine, int rank) {
  unsigned theirs;
  Four four;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.value[0]), "=f"(four.value[1]), "=f"(four.value[2]), "=f"(four.value[3]) : "r"(theirs)
               : "memory");
  return four;
}
#else
DEVICE int cluster_rank() { return 0; }
DEVICE constexpr int cluster_size() { return 1; }
DEVICE void cluster_arrive() {}
DEVICE void cluster_arrive_relaxed() {}
DEVICE void cluster_wait() { __syncthreads(); }
template <class T> DEVICE T read_remote(const T* mine, int) { return *mine; }
#endif

// Copies to shared memory that run behind the thread's back: start some, close the batch, and later
// wait until at most `Left` of the newest batches are still under way.
DEVICE void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copy16_or_zeros(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Left> DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory"); }

// Four 8 x 8 matrices of 16-bit elements, a row at each lane's address; `across` transposes each.
DEVICE void load_matrices(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
DEVICE void load_matrices_across(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}

// sum [16, 8] += left [16, 16] @ right [16, 8], in the fragments of mma.m16n8k16.
DEVICE void multiply(float (&sum)[4], const unsigned (&left)[4], unsigned right0, unsigned right1, Float16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}
DEVICE void multiply(float (&sum)[4], const unsigned (&left)[4], unsigned right0, unsigned right1, BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}
