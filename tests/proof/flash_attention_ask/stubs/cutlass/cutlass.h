// A stand-in for CUTLASS's header of this name, which a header beside flash_api.cpp includes for its .cu files.
#pragma once
