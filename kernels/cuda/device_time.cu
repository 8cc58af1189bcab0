#include "device_time.cuh"

#include "launch.cuh"

/// Nanoseconds of the device's clock into out [1], once all that was launched before has run.
///
/// The clock begins anywhere and runs at least every microsecond; only differences say something.
extern "C" int overstory_device_time(int64_t* out, void* stream) {
  using namespace overstory;
  return launch(device_time_kernel, 1, kWarpThreads, 0, stream, out);
}
