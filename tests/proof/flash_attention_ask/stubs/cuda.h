// A stand-in for the header of this name: what flash_api.cpp uses of it lies in described_device.h.
#pragma once
#include "described_device.h"
