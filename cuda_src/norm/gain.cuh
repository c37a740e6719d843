// Kept for its includers: the gains live with the other helpers of the norms.
#pragma once
#include "norm/common.cuh"
