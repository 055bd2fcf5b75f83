// Comes ahead of flash_api.cpp: torch's own headers first, then the names by which that file says "CUDA".
//
// A tensor of device `meta` stands for one on the GPU: it has shape, strides and dtype, and no memory.
#pragma once

#include "recorder.h"

#ifdef ATTNSEL_STABLE_ABI

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#define aoti_torch_device_type_cuda aoti_torch_device_type_meta
#include <torch/csrc/stable/tensor.h>
#undef aoti_torch_device_type_cuda
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#else

#include <torch/python.h>

#include <torch/library.h>
#include <torch/nn/functional.h>
#include <ATen/cuda/CUDAContext.h>

namespace c10::detail {
// TORCH_CHECK calls torchCheckFail, below renamed to this: Python is told the message without its place.
template <typename Message>
[[noreturn]] void attnsel_check_failed(char const* function, char const* file, uint32_t line, Message&& message) {
  attnsel::check_failed(file, line);
  torchCheckFail(function, file, line, std::forward<Message>(message));
}
}  // namespace c10::detail

#define torchCheckFail attnsel_check_failed
#define is_cuda is_meta
#define kCUDA kMeta

#endif

#define CUDA Meta  // the dispatch key of TORCH_LIBRARY_IMPL and STABLE_TORCH_LIBRARY_IMPL
