// What flash_api.cpp uses of torch's CUDA side: the described device, a stream and a generator.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>
#include <tuple>

#include "described_device.h"

namespace c10::cuda {

struct CUDAGuard {
  explicit CUDAGuard(c10::DeviceIndex) {}
  explicit CUDAGuard(c10::Device) {}
};

struct CUDAStream {
  cudaStream_t stream() const { return nullptr; }
};

inline CUDAStream getCurrentCUDAStream() { return {}; }

}  // namespace c10::cuda

namespace at {

struct PhiloxCudaState {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// A generator of the device that stands for CUDA: it draws nothing, since no kernel runs.
struct CUDAGeneratorImpl : public c10::GeneratorImpl {
  CUDAGeneratorImpl() : c10::GeneratorImpl(c10::Device(device_type()), c10::DispatchKeySet(c10::DispatchKey::Meta)) {}
  static c10::DeviceType device_type() { return c10::DeviceType::Meta; }

  PhiloxCudaState philox_cuda_state(uint64_t) { return {}; }

  void set_current_seed(uint64_t) override {}
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return 0; }
  uint64_t seed() override { return 0; }
  void set_state(c10::TensorImpl const&) override {}
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return {}; }

 private:
  CUDAGeneratorImpl* clone_impl() const override { return new CUDAGeneratorImpl(); }
};

namespace cuda {

using c10::cuda::CUDAGuard;
using c10::cuda::getCurrentCUDAStream;

inline cudaDeviceProp* getCurrentDeviceProperties() {
  return &attnsel::devices().at(attnsel::current_device());
}

namespace detail {
inline at::Generator const& getDefaultCUDAGenerator() {
  static at::Generator generator = at::make_generator<at::CUDAGeneratorImpl>();
  return generator;
}
}  // namespace detail

namespace philox {
inline std::tuple<uint64_t, uint64_t> unpack(at::PhiloxCudaState state) { return {state.seed, state.offset}; }
}  // namespace philox

}  // namespace cuda
}  // namespace at
