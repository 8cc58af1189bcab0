// A CUDA grid on a CPU, so that the kernels can be tested where there is no GPU.
//
// Use
//   A kernel is an ordinary `__global__ void f(...)` that takes everything it needs of the GPU from
//   `overstory::ptx` (ptx.cuh): no threadIdx, no __syncthreads, no `__shared__` (they do not
//   compile here); shared memory is dynamic, `ptx::shared_memory<T>()`. A `.cu` file holds thin
//   `extern "C" int overstory_<op>(..., void* stream)` that call `overstory::launch` (launch.cuh).
//   `overstory.kernels.cuda_library.simulator_library([sources])` compiles and loads it; by hand
//     g++ -x c++ -std=c++17 -O2 -DOVERSTORY_SIM -fno-strict-aliasing -Wno-unknown-pragmas
//         -ftrivial-auto-var-init=pattern -Wall -shared -fPIC -Ikernels/cuda
//   The result of a launcher is 0, or an error code with the reason in `overstory_sim_error()`.
//   `overstory_sim_seed(n)` chooses another order of threads: run a test under several.
// What it does
//   Blocks run one after another in a shuffled order, the threads of a block as fibers on one CPU
//   thread: a thread runs until a barrier or warp collective, then a seeded random choice goes on.
//   Spinning on another thread or block therefore hangs.
// What it refuses, naming block, thread, file and line
//   barriers and collectives that some threads miss, meet from another line, or left the kernel
//   before; part of a warp in a named barrier; a shuffle from outside of the mask; cp.async and
//   ldmatrix addresses out of range or unaligned; a cp.async or bulk copy never waited for; writes just outside
//   of shared memory, memory faults; more than 48 KB without `raise_shared_limit`.
// What it turns into wrong results (NaN, huge integers) that a test sees
//   shared memory read before it is written; a cp.async destination before its wait; with some
//   seeds of a few, data exchanged without the barrier or sync_warp it needs.
// What it cannot see: races between blocks; a sync_warp that another collective stands in for (on a
//   GPU a shuffle or vote does not order memory); registers, bank conflicts, timing.
#pragma once

#ifndef OVERSTORY_SIM
#error "the simulator needs -DOVERSTORY_SIM"
#endif

#include <cstdint>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#include "intrinsics.h"

// Weak: every .cu of a library defines them, one of each stays.
extern "C" {
__attribute__((weak, visibility("default"))) const char* overstory_sim_error() {
  return overstory::sim::machine.error().c_str();
}
__attribute__((weak, visibility("default"))) void overstory_sim_seed(std::uint64_t seed) {
  overstory::sim::machine.seed(seed);
}
__attribute__((weak, visibility("default"))) std::uint64_t overstory_sim_bank_conflicts() {
  return overstory::sim::machine.bank_conflicts();
}
}
