// What a call came to: the kernels it would have launched, and the check that refused it.
//
// Standard C++ only: flash_api_stable.cpp of hopper must not see torch's other headers.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include <cutlass/numeric_types.h>

namespace attnsel {

struct Recorded {
  std::string launches;  // JSON objects, one a line
  std::string where;     // "file:line" of the check that failed last
};

inline Recorded& recorded() {
  static Recorded all;
  return all;
}

inline void check_failed(char const* file, uint32_t line) {
  recorded().where = std::string(file) + ":" + std::to_string(line);
}

template <typename T>
std::string type_name() {
  if constexpr (std::is_same_v<T, cutlass::half_t>) {
    return "\"float16\"";
  } else if constexpr (std::is_same_v<T, cutlass::bfloat16_t>) {
    return "\"bfloat16\"";
  } else if constexpr (std::is_same_v<T, cutlass::float_e4m3_t>) {
    return "\"float8_e4m3fn\"";
  } else if constexpr (std::is_same_v<T, float>) {
    return "\"float32\"";
  } else {
    static_assert(sizeof(T) == 0, "an element type that has no name here");
  }
}

// One launch. Fields that some version of Flash_fwd_params lacks are asked for by name first.
class Launch {
 public:
  explicit Launch(char const* kernel) : text_("{\"kernel\":\"" + std::string(kernel) + "\"") {}
  ~Launch() { recorded().launches += text_ + "}\n"; }

  template <typename T>
  void type(char const* name) { put(name, type_name<T>()); }
  void number(char const* name, bool value) { put(name, value ? "true" : "false"); }
  void number(char const* name, int value) { put(name, std::to_string(value)); }
  void number(char const* name, float value) { put(name, std::to_string(value)); }

  template <typename Params>
  void params(Params const& p) {
#define ATTNSEL_FIELD(field) \
  if constexpr (requires { p.field; }) number(#field, static_cast<decltype(widen(p.field))>(p.field))
    ATTNSEL_FIELD(b);
    ATTNSEL_FIELD(h);
    ATTNSEL_FIELD(seqlen_q);
    ATTNSEL_FIELD(seqlen_k);
    ATTNSEL_FIELD(d);
    ATTNSEL_FIELD(dv);
    ATTNSEL_FIELD(num_splits);
    ATTNSEL_FIELD(is_causal);
    ATTNSEL_FIELD(is_local);
    ATTNSEL_FIELD(window_size_left);
    ATTNSEL_FIELD(window_size_right);
    ATTNSEL_FIELD(attention_chunk);
    ATTNSEL_FIELD(softcap);
    ATTNSEL_FIELD(p_dropout);  // the probability of keeping
    ATTNSEL_FIELD(deterministic);
    ATTNSEL_FIELD(pack_gqa);
    ATTNSEL_FIELD(pagedkv_tma);
#undef ATTNSEL_FIELD
  }

 private:
  static bool widen(bool);
  static int widen(int);
  static float widen(float);

  void put(char const* name, std::string const& value) {
    text_ += ",\"" + std::string(name) + "\":" + value;
  }

  std::string text_;
};

}  // namespace attnsel
