// Starting a kernel from the launch layer. Nothing here allocates, waits or reads a device value.
#pragma once

#include <cstddef>

#ifdef OVERSTORY_SIM
#include "sim/sim.h"
#else
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#endif

namespace overstory {

#ifdef OVERSTORY_SIM

/// Lets `Kernel` use more than 48 KB of dynamic shared memory; 0 or an error code.
template <auto Kernel>
int raise_shared_limit(std::size_t bytes) {
  if (bytes > sim::kSharedLimit) return sim::machine.refuse("more than 99 KB of shared memory");
  sim::machine.raise_shared_limit(reinterpret_cast<const void*>(Kernel), bytes);
  return 0;
}

/// Runs the grid here and now. An empty grid is no launch.
template <typename... Params, typename... Args>
int launch(void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared_bytes,
           void* /*stream*/, Args... args) {
  if (grid.x == 0 || grid.y == 0) return 0;
  if (grid.z != 1) return sim::machine.refuse("a grid of three dimensions");
  if (!sim::machine.may_use_shared(reinterpret_cast<const void*>(kernel), shared_bytes)) {
    return sim::machine.refuse("more than 48 KB of shared memory without raise_shared_limit");
  }
  return sim::machine.run({grid.x, grid.y}, threads, shared_bytes,
                          [=] { kernel(static_cast<Params>(args)...); });
}

/// As `launch`: the simulator starts nothing early.
template <typename... Params, typename... Args>
int launch_dependent(void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared_bytes,
                     void* stream, Args... args) {
  return launch(kernel, grid, threads, shared_bytes, stream, args...);
}

#else

/// Lets `Kernel` use more than 48 KB of dynamic shared memory on the current device. Call it in
/// the launcher: only the first call per device (of the first 64) reaches the driver, so warm up
/// before capture. `bytes` must be the kernel's maximum, not that of one launch.
template <auto Kernel>
int raise_shared_limit(std::size_t bytes) {
  static std::atomic<std::uint64_t> done{0};
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if ((done.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(Kernel),
                                           cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(bytes));
  if (error == cudaSuccess) {
    // As many blocks as fit, not as much L1 as one block leaves.
    error = cudaFuncSetAttribute(reinterpret_cast<const void*>(Kernel),
                                 cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

namespace detail {

template <typename... Params, typename... Args>
int launch_kernel(bool dependent, void (*kernel)(Params...), dim3 grid, int threads,
                  std::size_t shared_bytes, void* stream, Args... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace detail

/// Starts the kernel on `stream` (a cudaStream_t); cudaSuccess or what the launch said. An empty
/// grid is no launch.
template <typename... Params, typename... Args>
int launch(void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared_bytes,
           void* stream, Args... args) {
  return detail::launch_kernel(false, kernel, grid, threads, shared_bytes, stream, args...);
}

/// `launch` that may begin while the kernel before it on the stream still runs (programmatic
/// dependent launch): the kernel must call `ptx::pdl_wait()` before it reads what that one wrote.
template <typename... Params, typename... Args>
int launch_dependent(void (*kernel)(Params...), dim3 grid, int threads, std::size_t shared_bytes,
                     void* stream, Args... args) {
  return detail::launch_kernel(true, kernel, grid, threads, shared_bytes, stream, args...);
}

#endif

}  // namespace overstory
