"""Two small packages of ours in the layout of FlashAttention's sources, with the calls that theirs make."""

from __future__ import annotations

from pathlib import Path

_FLASH_H_TWO = """
#pragma once
#include <cuda.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
struct Flash_fwd_params {
  int b, h, seqlen_q, seqlen_k, d, num_splits, *block_table;
  float p_dropout;
  bool is_bf16;
  at::PhiloxCudaState philox_args;
};
template<typename T, int Headdim> void run_mha_fwd_(Flash_fwd_params &params, cudaStream_t stream);
"""

_API_TWO = """
#include <torch/python.h>
#include <torch/nn/functional.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <cutlass/numeric_types.h>
#include "flash.h"

std::vector<at::Tensor> mha_fwd(at::Tensor const &q, std::optional<at::Tensor> &block_table, float p_dropout,
                                std::optional<at::Generator> gen_) {
  at::cuda::CUDAGuard device_guard{q.device()};
  auto dprops = at::cuda::getCurrentDeviceProperties();
  TORCH_CHECK(dprops->major >= 8, "too old");
  TORCH_CHECK(q.is_cuda(), "q must be on CUDA");
  auto padded = torch::nn::functional::pad(q, torch::nn::functional::PadFuncOptions({0, 8 - q.size(-1) % 8}));
  Flash_fwd_params params{};
  params.b = q.size(0); params.h = q.size(2); params.d = padded.size(-1);
  params.seqlen_q = params.seqlen_k = q.size(1);
  params.num_splits = dprops->multiProcessorCount;
  params.p_dropout = 1.f - p_dropout;
  params.block_table = block_table.has_value() ? block_table.value().data_ptr<int>() : nullptr;
  TORCH_CHECK(!params.block_table || params.b > 1, "a table for one sequence");
  if (p_dropout > 0.f) {
    auto gen = at::get_generator_or_default<at::CUDAGeneratorImpl>(
        gen_, at::cuda::detail::getDefaultCUDAGenerator());
    std::lock_guard<std::mutex> lock(gen->mutex_);
    params.philox_args = gen->philox_cuda_state(32);
  }
  auto state = torch::empty({2}, torch::TensorOptions().dtype(torch::kInt64).device(torch::kCUDA));
  auto stream = at::cuda::getCurrentCUDAStream().stream();
  if (q.dtype() == torch::kBFloat16) { run_mha_fwd_<cutlass::bfloat16_t, 64>(params, stream); }
  else { run_mha_fwd_<cutlass::half_t, 64>(params, stream); }
  return {torch::empty_like(q), state};
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("fwd", &mha_fwd); }
"""

_PYTHON_TWO = """
import flash_attn_2_cuda
import torch

@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), device_types="cuda")
def _flash_attn_forward(q: torch.Tensor, dropout_p: float) -> torch.Tensor:
    return flash_attn_2_cuda.fwd(q, None, dropout_p, None)[0]

@torch.library.register_fake("flash_attn::_flash_attn_forward")
def _flash_attn_forward_fake(q: torch.Tensor, dropout_p: float) -> torch.Tensor:
    raise AssertionError("the fake of an operator checks nothing, and is not to be asked")

def flash_attn_func(q, dropout_p=0.0, block_table=None):
    assert q.dim() == 4
    if block_table is not None:
        return flash_attn_2_cuda.fwd(q, block_table, dropout_p, None)[0]
    return torch.ops.flash_attn._flash_attn_forward(q, dropout_p)

def capability():
    return torch.cuda.get_device_capability(None)
"""

_FLASH_H_THREE = """
#pragma once
#include <cuda.h>
struct Flash_fwd_params { int b, h, seqlen_q, seqlen_k, d, dv, arch, num_splits; };

template <int Arch, typename T, int kHeadDim, bool Split>
void run_mha_fwd_(Flash_fwd_params &params, cudaStream_t stream);
void prepare_varlen_num_blocks(Flash_fwd_params &params, cudaStream_t stream, bool packgqa, int blockM);
"""

# Keeps a device's properties by its index, as theirs does.
_API_THREE = """
#include <Python.h>
#include <cutlass/numeric_types.h>
#include "flash.h"
#include <torch/csrc/stable/tensor.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#include <cuda_runtime.h>
#include <map>

extern "C" PyObject* PyInit__C(void) {
  static struct PyModuleDef module_def = {PyModuleDef_HEAD_INIT, "_C", NULL, -1, NULL};
  return PyModule_Create(&module_def);
}

using torch::stable::Tensor;

static cudaDeviceProp const& properties() {
  static std::map<int, cudaDeviceProp> kept;
  int index;
  cudaGetDevice(&index);
  if (!kept.count(index)) { cudaGetDeviceProperties(&kept[index], index); }
  return kept[index];
}

Tensor mha_fwd(Tensor q, bool varlen) {
  torch::stable::accelerator::DeviceGuard guard(q.get_device());
  STD_TORCH_CHECK(properties().major >= 8, "too old");
  STD_TORCH_CHECK(q.is_cuda(), "q must be on CUDA");
  STD_TORCH_CHECK(q.data_ptr() != nullptr, "no address");
  Flash_fwd_params params{};
  params.b = q.size(0); params.seqlen_q = params.seqlen_k = q.size(1); params.h = q.size(2);
  params.d = q.size(3);
  params.arch = properties().major * 10 + properties().minor;
  params.num_splits = properties().multiProcessorCount;
  void* stream_ptr = nullptr;
  aoti_torch_get_current_cuda_stream(torch::stable::accelerator::getCurrentDeviceIndex(), &stream_ptr);
  auto stream = static_cast<cudaStream_t>(stream_ptr);
  if (varlen) { prepare_varlen_num_blocks(params, stream, true, 128); }
  if (params.arch >= 90) { run_mha_fwd_<90, cutlass::bfloat16_t, 64, false>(params, stream); }
  else { run_mha_fwd_<80, cutlass::half_t, 64, true>(params, stream); }
  return torch::stable::empty_like(q);
}

void boxed_mha_fwd(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(
      mha_fwd(torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<bool>(stack[1])));
}

STABLE_TORCH_LIBRARY(flash_attn_3, m) { m.def("fwd(Tensor q, bool varlen) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(flash_attn_3, CUDA, m) { m.impl("fwd", &boxed_mha_fwd); }
"""

_PYTHON_THREE = """
import flash_attn_3._C
import torch

def flash_attn_func(q, varlen=False):
    assert q.dim() == 4
    return torch.ops.flash_attn_3.fwd(q, varlen)
"""


def write_two(folder: Path) -> Path:
    """A release in the layout of FlashAttention 2."""
    return _write(
        folder,
        {
            "flash_attn/__init__.py": '__version__ = "2.0.0"\n',
            "flash_attn/flash_attn_interface.py": _PYTHON_TWO,
            "csrc/flash_attn/flash_api.cpp": _API_TWO,
            "csrc/flash_attn/src/flash.h": _FLASH_H_TWO,
        },
    )


def write_three(folder: Path) -> Path:
    """A release in the layout of FlashAttention 3, with the file that is built for torch 2.9 and newer."""
    return _write(
        folder,
        {
            "hopper/__init__.py": '__version__ = "3.0.0"\n',
            "hopper/flash_attn_interface.py": _PYTHON_THREE,
            "hopper/flash_api.cpp": "// for older torch\n",
            "hopper/flash_api_stable.cpp": _API_THREE,
            "hopper/flash.h": _FLASH_H_THREE,
        },
    )


def _write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder
