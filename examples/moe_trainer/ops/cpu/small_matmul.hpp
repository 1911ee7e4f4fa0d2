// Products of small, padded tiles in cache: the inside of the KDA chunks and of sparse attention.
//
// Rows of C come in fours and its columns in sixteens: callers pad with zeros. Sums run over k in order.
#pragma once

#include <immintrin.h>

#include "examples/moe_trainer/ops/cpu/vec.hpp"

namespace terrace::trainer::cpu {

// Element (i, k) of the left factor: at[i * row + k * column], so that either order of storage will do.
struct Left {
  const float* at;
  std::int64_t row, column;
};
struct Right {
  const float* at;
  std::int64_t row;
};  // element (k, j): at[k * row + j]
struct Out {
  float* at;
  std::int64_t row;
};
struct Extent {
  std::int64_t m, n, k;
};

enum class Into : std::uint8_t { kSet, kAdd, kSubtract };

template <Into Mode>
inline void tile_4x16(const Left& a, const Right& b, const Out& c, std::int64_t depth) {
  Vec acc[4][2] = {};
  const float* a0 = a.at;
  const float* row = b.at;
  for (std::int64_t k = 0; k < depth; ++k, a0 += a.column, row += b.row) {
    const Vec b0 = load(row), b1 = load(row + 8);
    for (int i = 0; i < 4; ++i) {
      const Vec x = splat(a0[i * a.row]);
      acc[i][0] += x * b0;
      acc[i][1] += x * b1;
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      float* at = c.at + i * c.row + j * 8;
      if constexpr (Mode == Into::kSet) store(at, acc[i][j]);
      if constexpr (Mode == Into::kAdd) store(at, load(at) + acc[i][j]);
      if constexpr (Mode == Into::kSubtract) store(at, load(at) - acc[i][j]);
    }
  }
}

// C (m, n) = or += or -= A (m, k) B (k, n); m a multiple of 4, n of 16.
template <Into Mode>
inline void multiply(const Extent& size, const Left& a, const Right& b, const Out& c) {
  for (std::int64_t j = 0; j < size.n; j += 16) {
    for (std::int64_t i = 0; i < size.m; i += 4) {
      tile_4x16<Mode>({a.at + i * a.row, a.row, a.column}, {b.at + j, b.row}, {c.at + i * c.row + j, c.row},
                      size.k);
    }
  }
}

// Lane i of vector j becomes lane j of vector i.
inline void transpose_lanes(Vec* v) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = (__m256)v[i];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = (Vec)_mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
    v[i + 4] = (Vec)_mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
  }
}

// The sum of the lanes of each of eight vectors, one a lane. Destroys v.
inline Vec lane_sums(Vec* v) {
  transpose_lanes(v);
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// to (columns, rows) = from (rows, columns) transposed; both multiples of 8.
struct Grid {
  std::int64_t rows, columns;
};
inline void transpose(const Grid& size, const Right& from, const Out& to) {
  for (std::int64_t i = 0; i < size.rows; i += 8) {
    for (std::int64_t j = 0; j < size.columns; j += 8) {
      Vec v[8];
      for (int n = 0; n < 8; ++n) v[n] = load(from.at + (i + n) * from.row + j);
      transpose_lanes(v);
      for (int n = 0; n < 8; ++n) store(to.at + (j + n) * to.row + i, v[n]);
    }
  }
}

}  // namespace terrace::trainer::cpu
