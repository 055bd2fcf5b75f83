// A stand-in for torch's header of this name, of which flash_api.cpp uses `pad`; the whole takes a minute to compile.
#pragma once
#include "torch/nn/functional/padding.h"
