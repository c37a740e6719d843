// Kept for its includers: clear() lives with the vectors.
#pragma once
#include "common/vec.cuh"
