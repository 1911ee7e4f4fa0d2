// Which tile of a grouped product a block computes next. Offsets lie on the device and are walked there;
// tiles are numbered group by group, so a block that takes every gridDim-th tile only ever walks forward.
#pragma once

#include <cstdint>

namespace terrace::trainer::cuda {

// A tile of C: its group, the rows of A it comes from, and where in C it lies, in elements.
struct GroupedTile {
  int group;
  int first_row;  // of C, absolute
  int rows_left;  // rows of the group from first_row on; may exceed the tile
  int first_column;
  int depth_begin;  // what is summed over: elements of a row, or, of a weight gradient, rows of the group
  int depth_end;
};

// Tiles of one group in bands of this many rows of tiles, down each column of a band: blocks that run
// together share columns of W and rows of A in L2.
inline constexpr int kBandTiles = 16;

struct TilePosition {
  int row, column;  // in tiles
};
__device__ inline TilePosition banded(int local, int row_tiles, int column_tiles) {
  const int band = local / (kBandTiles * column_tiles);
  const int first = band * kBandTiles;
  const int height = row_tiles - first < kBandTiles ? row_tiles - first : kBandTiles;
  const int inside = local - first * column_tiles;
  return {first + inside % height, inside / height};
}

// Rows sorted by group are the rows of C.
template <int kTileM, int kColumns>
class RowTiles {
 public:
  __device__ RowTiles(const std::int32_t* offsets, int groups, int width, int depth)
      : offsets_(offsets), groups_(groups), column_tiles_((width + kColumns - 1) / kColumns), depth_(depth) {
    end_ = offsets[0];
  }
  // Tile numbers never descend. False: there are no more.
  [[nodiscard]] __device__ bool find(int tile, GroupedTile* found) {
    while (tile >= before_ + tiles_) {
      before_ += tiles_;
      if (++group_ >= groups_) return false;
      begin_ = end_;
      end_ = offsets_[group_ + 1];
      row_tiles_ = end_ > begin_ ? (end_ - begin_ + kTileM - 1) / kTileM : 0;
      tiles_ = row_tiles_ * column_tiles_;
    }
    const TilePosition at = banded(tile - before_, row_tiles_, column_tiles_);
    const int first = begin_ + at.row * kTileM;
    *found = {.group = group_,
              .first_row = first,
              .rows_left = end_ - first,
              .first_column = at.column * kColumns,
              .depth_begin = 0,
              .depth_end = depth_};
    return true;
  }

 private:
  const std::int32_t* offsets_;
  int groups_, column_tiles_, depth_;
  int group_ = -1, begin_ = 0, end_ = 0, row_tiles_ = 0;
  int tiles_ = 0;   // of this group
  int before_ = 0;  // of those before it
};

// Every group has a C of its own, (height, width); its rows are what is summed over.
template <int kTileM, int kColumns>
class WeightTiles {
 public:
  __device__ WeightTiles(const std::int32_t* offsets, int groups, int width, int height)
      : offsets_(offsets),
        groups_(groups),
        height_(height),
        row_tiles_((height + kTileM - 1) / kTileM),
        column_tiles_((width + kColumns - 1) / kColumns) {}
  [[nodiscard]] __device__ bool find(int tile, GroupedTile* found) {
    const int each = row_tiles_ * column_tiles_;
    const int group = tile / each;
    if (group >= groups_) return false;
    const TilePosition at = banded(tile - group * each, row_tiles_, column_tiles_);
    const int begin = offsets_[group];
    const int end = offsets_[group + 1];
    *found = {.group = group,
              .first_row = at.row * kTileM,
              .rows_left = height_ - at.row * kTileM,
              .first_column = at.column * kColumns,
              .depth_begin = begin,
              .depth_end = end > begin ? end : begin};
    return true;
  }

 private:
  const std::int32_t* offsets_;
  int groups_, height_, row_tiles_, column_tiles_;
};

}  // namespace terrace::trainer::cuda
