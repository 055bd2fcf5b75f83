// The element types that flash_api.cpp hands to kernel templates: names only, no arithmetic.
#pragma once

namespace cutlass {
struct half_t {};
struct bfloat16_t {};
struct float_e4m3_t {};
}  // namespace cutlass
