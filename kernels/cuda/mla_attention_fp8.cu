// The attention kernel over a cache in e4m3, compiled beside that over bf16 (mla_attention.cu).

#ifndef OVERSTORY_SIM  // there mla_attention.cu holds both: a library may be of one source
#include "mla_attend_fp8.cuh"
#endif
