// Every GPU intrinsic that the kernels use, one function each; under OVERSTORY_SIM the
// simulator's functions of the same names (sim/intrinsics.h). Only what sm_90 and sm_120 share.
#pragma once

#ifdef OVERSTORY_SIM

#include "sim/sim.h"

#else

#include <cuda_runtime.h>

#include <cstdint>

#define OVERSTORY_DEVICE __device__ __forceinline__

namespace overstory::ptx {

OVERSTORY_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
OVERSTORY_DEVICE int lane() { return static_cast<int>(threadIdx.x) & 31; }
OVERSTORY_DEVICE int warp() { return static_cast<int>(threadIdx.x) >> 5; }
OVERSTORY_DEVICE int block() { return static_cast<int>(blockIdx.x); }
OVERSTORY_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
OVERSTORY_DEVICE int block_threads() { return static_cast<int>(blockDim.x); }
OVERSTORY_DEVICE int grid_size() { return static_cast<int>(gridDim.x); }
OVERSTORY_DEVICE int grid_size_y() { return static_cast<int>(gridDim.y); }

/// Start of the dynamic shared memory, 128-byte aligned.
template <typename T>
OVERSTORY_DEVICE T* shared_memory() {
  extern __shared__ __align__(128) unsigned char overstory_shared[];
  return reinterpret_cast<T*>(overstory_shared);
}

OVERSTORY_DEVICE std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

/// The value, but computed here and now: nothing derived from it moves out of a loop, where it
/// would hold a register all the time.
OVERSTORY_DEVICE int computed_here(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// A number that all lanes of the warp have and none is negative, so that the compiler knows it:
/// branches on it do not diverge.
OVERSTORY_DEVICE int uniform(int value) {
  return static_cast<int>(__reduce_max_sync(~0u, static_cast<unsigned>(value)));
}
/// The address, which the compiler keeps in a register instead of asking a special one for it again
/// in every turn of a loop.
OVERSTORY_DEVICE char* shared_here(char* shared) {
  asm volatile("" : "+l"(shared));
  __builtin_assume(__isShared(shared));
  return shared;
}

// ---- barriers

OVERSTORY_DEVICE void sync_block() { __syncthreads(); }
/// Whether one thread of the block said so, in all of them.
OVERSTORY_DEVICE bool sync_block_or(bool value) { return __syncthreads_or(value) != 0; }
OVERSTORY_DEVICE void sync_warp(std::uint32_t mask = ~0u) { __syncwarp(mask); }
/// Barrier `id` (1..15) of `threads` threads, whole warps.
OVERSTORY_DEVICE void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Counts for barrier `id` without waiting at it; other threads of the `threads` sync.
OVERSTORY_DEVICE void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- barriers in shared memory that count arrivals and bytes (mbarrier); and bulk copies

/// One thread; then `mbarrier_fence_init` and a barrier of the block before anybody uses it.
OVERSTORY_DEVICE void mbarrier_init(std::uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
OVERSTORY_DEVICE void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // for the copy engine
}
/// What this thread has read and written in shared memory comes before bulk copies that are issued
/// after a barrier.
OVERSTORY_DEVICE void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// One arrival of the phase, which also waits for so many bytes of bulk copies more.
OVERSTORY_DEVICE void mbarrier_arrive_expect(std::uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
/// Until the phase of this parity (0 for the first) is complete.
OVERSTORY_DEVICE void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
/// Whole multiples of 16 bytes, aligned, from global to shared memory; the barrier counts them.
OVERSTORY_DEVICE void bulk_copy(void* shared, const void* global, int bytes,
                                std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
/// The 128 bytes around it to the L2 cache, sometime.
OVERSTORY_DEVICE void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(global)) : "memory");
}

// ---- shuffles and votes: values of 4 or 8 bytes

template <typename T>
OVERSTORY_DEVICE T shfl(T value, int source, std::uint32_t mask = ~0u) {
  return __shfl_sync(mask, value, source);
}
template <typename T>
OVERSTORY_DEVICE T shfl_xor(T value, int lane_mask, std::uint32_t mask = ~0u) {
  return __shfl_xor_sync(mask, value, lane_mask);
}
/// The value of lane - delta; the first `delta` lanes keep their own.
template <typename T>
OVERSTORY_DEVICE T shfl_up(T value, int delta, std::uint32_t mask = ~0u) {
  return __shfl_up_sync(mask, value, static_cast<unsigned>(delta));
}
/// The value of lane + delta; the last `delta` lanes keep their own.
template <typename T>
OVERSTORY_DEVICE T shfl_down(T value, int delta, std::uint32_t mask = ~0u) {
  return __shfl_down_sync(mask, value, static_cast<unsigned>(delta));
}
OVERSTORY_DEVICE std::uint32_t ballot(bool value, std::uint32_t mask = ~0u) {
  return __ballot_sync(mask, value);
}
OVERSTORY_DEVICE bool any(bool value, std::uint32_t mask = ~0u) {
  return __any_sync(mask, value) != 0;
}
OVERSTORY_DEVICE bool all(bool value, std::uint32_t mask = ~0u) {
  return __all_sync(mask, value) != 0;
}
OVERSTORY_DEVICE std::uint32_t warp_max(std::uint32_t value) {
  return __reduce_max_sync(~0u, value);
}
OVERSTORY_DEVICE int warp_sum(int value) { return __reduce_add_sync(~0u, value); }
OVERSTORY_DEVICE std::uint32_t warp_min(std::uint32_t value) {
  return __reduce_min_sync(~0u, value);
}

// ---- memory

/// 16 bytes from global to shared memory, both aligned; 16 zero bytes if not `valid`, and then
/// `global` is not read (but must be a number that an address can be).
OVERSTORY_DEVICE void cp_async_16(void* shared, const void* global, bool valid = true) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}
OVERSTORY_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Until at most the N youngest groups of this thread are in flight.
template <int N>
OVERSTORY_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

OVERSTORY_DEVICE int atomic_add(int* at, int value) { return atomicAdd(at, value); }
OVERSTORY_DEVICE std::uint32_t atomic_add(std::uint32_t* at, std::uint32_t value) {
  return atomicAdd(at, value);
}
OVERSTORY_DEVICE std::uint64_t atomic_add(std::uint64_t* at, std::uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(at), value);
}
/// What was there; replaced if it was `expected`.
OVERSTORY_DEVICE int atomic_cas(int* at, int expected, int value) {
  return atomicCAS(at, expected, value);
}
OVERSTORY_DEVICE int atomic_min(int* at, int value) { return atomicMin(at, value); }
OVERSTORY_DEVICE void fence_device() { __threadfence(); }
template <typename T>
OVERSTORY_DEVICE T load_volatile(const T* at) {
  return *static_cast<const volatile T*>(at);
}
/// Read-only data: nobody may write it while the kernel runs.
template <typename T>
OVERSTORY_DEVICE T load_readonly(const T* at) {
  return __ldg(at);
}

/// 16 aligned bytes of read-only data that is read once: past the L1 cache.
OVERSTORY_DEVICE uint4 load_stream(const void* at) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(__cvta_generic_to_global(at)));
  return value;
}

/// 16 aligned bytes that are read once, of data that the kernel may write later.
OVERSTORY_DEVICE uint4 load_once(const void* at) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(__cvta_generic_to_global(at))
               : "memory");
  return value;
}

/// Programmatic dependent launch: until all that the kernel before wrote can be seen.
OVERSTORY_DEVICE void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/// The next kernel's blocks may start once every block has come here or left.
OVERSTORY_DEVICE void pdl_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- bits and numbers

OVERSTORY_DEVICE int popcount(std::uint32_t bits) { return __popc(bits); }
OVERSTORY_DEVICE int popcount(std::uint64_t bits) { return __popcll(bits); }
/// Index of the lowest set bit, -1 if there is none.
OVERSTORY_DEVICE int lowest_bit(std::uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }
OVERSTORY_DEVICE int lowest_bit(std::uint64_t bits) {
  return __ffsll(static_cast<long long>(bits)) - 1;
}
OVERSTORY_DEVICE int leading_zeros(std::uint32_t bits) { return __clz(static_cast<int>(bits)); }

OVERSTORY_DEVICE std::uint32_t float_bits(float value) { return __float_as_uint(value); }
OVERSTORY_DEVICE float bits_float(std::uint32_t bits) { return __uint_as_float(bits); }
/// Sum and product that no compiler may contract into a fused multiply-add.
OVERSTORY_DEVICE float add_rn(float a, float b) { return __fadd_rn(a, b); }
OVERSTORY_DEVICE float mul_rn(float a, float b) { return __fmul_rn(a, b); }
OVERSTORY_DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
/// The larger one; NaN if one is (fmaxf would return the other).
OVERSTORY_DEVICE float max_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
/// Of two pairs; a positive NaN where there is one.
OVERSTORY_DEVICE std::uint32_t max_nan_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
OVERSTORY_DEVICE std::uint32_t max_nan_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
/// Upper 64 bits of the product.
OVERSTORY_DEVICE std::uint64_t multiply_high(std::uint64_t a, std::uint64_t b) {
  return __umul64hi(a, b);
}
/// 2^value with 2 ulp; results below the normal range are 0.
OVERSTORY_DEVICE float exp2_fast(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
OVERSTORY_DEVICE float log2_fast(float value) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

OVERSTORY_DEVICE float f16_to_float(std::uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
OVERSTORY_DEVICE float bf16_to_float(std::uint16_t bits) {
  return __uint_as_float(static_cast<std::uint32_t>(bits) << 16);
}
/// Round to nearest even.
OVERSTORY_DEVICE std::uint16_t float_to_bf16(float value) {
  std::uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
OVERSTORY_DEVICE std::uint32_t pack_bf16x2(float low, float high) {
  std::uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
/// Products of two pairs; numbers below the smallest normal one count.
OVERSTORY_DEVICE std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
/// Round to nearest even; beyond the range infinity.
OVERSTORY_DEVICE std::uint32_t pack_f16x2(float low, float high) {
  std::uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
/// Round to nearest even, saturating at 448; NaN is 0x7F.
OVERSTORY_DEVICE std::uint16_t pack_e4m3x2(float low, float high) {
  std::uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}
OVERSTORY_DEVICE void unpack_e4m3x2(std::uint16_t bits, float& low, float& high) {
  asm("{\n\t.reg .b32 pair;\n\t.reg .b16 first, second;\n\t"
      "cvt.rn.f16x2.e4m3x2 pair, %2;\n\t"
      "mov.b32 {first, second}, pair;\n\t"
      "cvt.f32.f16 %0, first;\n\t"
      "cvt.f32.f16 %1, second;\n\t}"
      : "=f"(low), "=f"(high)
      : "h"(bits));
}

// ---- matrices: the whole warp, converged

OVERSTORY_DEVICE void ldmatrix_x4(std::uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}
OVERSTORY_DEVICE void ldmatrix_x2(std::uint32_t (&r)[2], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(shared))
               : "memory");
}
OVERSTORY_DEVICE void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}
OVERSTORY_DEVICE void ldmatrix_x2_trans(std::uint32_t (&r)[2], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(shared))
               : "memory");
}

/// d += a b: a 16 x 16 row-major, b 16 x 8 column-major, bf16; d float32.
OVERSTORY_DEVICE void mma_bf16_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4],
                                        const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/// d += a b: a 16 x 32 row-major, b 32 x 8 column-major, e4m3; d float32.
OVERSTORY_DEVICE void mma_e4m3_m16n8k32(float (&d)[4], const std::uint32_t (&a)[4],
                                        const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace overstory::ptx

#undef OVERSTORY_DEVICE

#endif
