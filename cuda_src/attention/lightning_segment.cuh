// Chunks and segments of a scan of lightning attention.
#pragma once
#include "common/abi.cuh"

namespace rtk {

inline constexpr int kScanRows = 64;  // of a chunk

// Rows of a segment of a sequence, in the order of the scan.
struct Segment {
    int first, rows;

    RTK_DEVICE Segment(int segment, i64 segments, int length) {
        const int chunks = (length + kScanRows - 1) / kScanRows;
        const int each = (chunks + static_cast<int>(segments) - 1) / static_cast<int>(segments) * kScanRows;
        first = min(segment * each, length), rows = min(each, length - first);
    }
};

}  // namespace rtk
