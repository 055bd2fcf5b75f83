// A stand-in for torch's header of this name: zeros around a tensor.
#pragma once

#include <torch/types.h>

#include <utility>
#include <vector>

namespace torch::nn::functional {

struct PadFuncOptions {
  explicit PadFuncOptions(std::vector<int64_t> pad) : pad(std::move(pad)) {}
  std::vector<int64_t> pad;
};

inline at::Tensor pad(at::Tensor const& tensor, PadFuncOptions const& options) {
  return at::constant_pad_nd(tensor, options.pad, 0);
}

}  // namespace torch::nn::functional
