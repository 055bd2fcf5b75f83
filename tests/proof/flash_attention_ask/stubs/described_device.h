// The CUDA runtime of a machine whose GPUs are descriptions: as much of it as flash_api.cpp asks for.
//
// Every description has an index of its own, as a GPU has in a machine of many, because a source may read a
// device's properties once and keep them (flash_api_stable.cpp of hopper does).
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
using cudaError = cudaError_t;

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
};

struct cudaDeviceProp {
  int major;
  int minor;
  int multiProcessorCount;
};

namespace attnsel {

constexpr int kMostDevices = 1024;

inline std::vector<cudaDeviceProp>& devices() {
  static std::vector<cudaDeviceProp> all{{8, 0, 108}};
  return all;
}

inline int& current_device() {
  static int index = 0;
  return index;
}

inline void describe(int major, int minor, int sm_count) {
  auto& all = devices();
  for (size_t i = 0; i < all.size(); ++i) {
    if (all[i].major == major && all[i].minor == minor && all[i].multiProcessorCount == sm_count) {
      current_device() = static_cast<int>(i);
      return;
    }
  }
  if (all.size() == kMostDevices) {
    throw std::runtime_error("too many devices were described to one process");
  }
  all.push_back({major, minor, sm_count});
  current_device() = static_cast<int>(all.size()) - 1;
}

}  // namespace attnsel

inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = attnsel::kMostDevices;
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* index) {
  *index = attnsel::current_device();
  return cudaSuccess;
}

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
  *properties = attnsel::devices().at(index);
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int index) {
  cudaDeviceProp const& found = attnsel::devices().at(index);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = found.multiProcessorCount; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = found.major; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = found.minor; return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }  // nothing is launched, so nothing failed

inline char const* cudaGetErrorString(cudaError_t) { return "an attribute that the described device lacks"; }
