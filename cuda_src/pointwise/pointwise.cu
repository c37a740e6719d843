// The pointwise and copy families of torch's operators: the kernels of kernels.cuh with the functors of functors.cuh.
#include "pointwise/functors.cuh"
