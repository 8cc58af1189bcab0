// The device's clock, written behind what was launched before it.
#pragma once

#include <cstdint>

#include "ptx.cuh"
#include "tree_limits.cuh"

#ifdef OVERSTORY_SIM
#include <chrono>
#endif

namespace overstory {

/// Nanoseconds; the beginning is anybody's.
__device__ inline std::int64_t device_nanoseconds() {
#ifdef OVERSTORY_SIM
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
#else
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return static_cast<std::int64_t>(now);
#endif
}

__global__ void __launch_bounds__(kWarpThreads) device_time_kernel(std::int64_t* out) {
  if (ptx::lane() == 0) *out = device_nanoseconds();
}

}  // namespace overstory
