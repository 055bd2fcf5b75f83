// A stand-in for torch's header of this name, which asks torch for an accelerator, and a CPU build has none.
#pragma once

#include <cstdint>

namespace torch::stable::accelerator {

using DeviceIndex = int32_t;

struct DeviceGuard {
  explicit DeviceGuard(DeviceIndex) {}
};

inline DeviceIndex getCurrentDeviceIndex() { return 0; }

}  // namespace torch::stable::accelerator
