// Which tile of a grouped product a block computes next. Offsets lie on the device and are walked there;
// tiles are numbered group by group, so a block that takes them at a fixed step only ever walks forward.
//
// A cluster of two blocks takes a number together: two tiles of one column, one below the other, which read
// the same rows of B; or, in the last row of tiles of a group that has an odd count of them, two of one row,
// which read the same rows of A. There the second may lie past the last column: it loads zeros and stores
// nothing. Both have the same group and the same depth, so the blocks of a cluster run in step.
#pragma once

#include <cstdint>

namespace terrace::trainer::cuda {

// What the tiles of a cluster have in common.
enum class SharedOperand : std::uint8_t { kNone, kA, kB };

// A tile of C: its group, the rows of A it comes from, and where in C it lies, in elements.
struct GroupedTile {
  int group;
  int first_row;  // of C, absolute
  int rows_left;  // rows of the group from first_row on; may exceed the tile
  int first_column;
  int depth_begin;  // what is summed over: elements of a row, or, of a weight gradient, rows of the group
  int depth_end;
  SharedOperand shared;
};

// Tiles of one group in bands of this many rows of tiles, down each column of a band: blocks that run
// together share columns of W and rows of A in L2.
inline constexpr int kBandTiles = 16;

struct TilePosition {
  int row, column;  // in tiles
  SharedOperand shared;
};

// The tiles of one group by number, each number one tile of every block of the cluster.
template <int kBlocks>
struct TileNumbers {
  static_assert(kBlocks == 1 || kBlocks == 2);
  int row_tiles, column_tiles;

  [[nodiscard]] __device__ int count() const {
    return row_tiles / kBlocks * column_tiles + row_tiles % kBlocks * ((column_tiles + 1) / 2);
  }
  // `block`: in the cluster.
  [[nodiscard]] __device__ TilePosition at(int number, int block) const {
    constexpr int kBand = kBandTiles / kBlocks;
    const int rows = row_tiles / kBlocks;
    if (kBlocks > 1 && number >= rows * column_tiles) {
      return {row_tiles - 1, (number - rows * column_tiles) * 2 + block, SharedOperand::kA};
    }
    const int band = number / (kBand * column_tiles);
    const int first = band * kBand;
    const int height = rows - first < kBand ? rows - first : kBand;
    const int inside = number - first * column_tiles;
    return {(first + inside % height) * kBlocks + block, inside / height,
            kBlocks > 1 ? SharedOperand::kB : SharedOperand::kNone};
  }
};

// What the blocks of a grid walk over.
struct TileWalk {
  const std::int32_t* offsets;
  int groups;
  int width;   // of C
  int height;  // of C; used where every group has a C of its own
  int depth;   // of a sum; used where it is not a group's rows
  int block;   // in the cluster
};

// Rows sorted by group are the rows of C.
template <int kTileM, int kColumns, int kBlocks>
class RowTiles {
 public:
  explicit __device__ RowTiles(const TileWalk& walk)
      : walk_(walk), column_tiles_((walk.width + kColumns - 1) / kColumns) {
    end_ = walk.offsets[0];
  }
  // Numbers never descend. False: there are no more.
  [[nodiscard]] __device__ bool find(int number, GroupedTile* found) {
    while (number >= before_ + count_) {
      before_ += count_;
      if (++group_ >= walk_.groups) return false;
      begin_ = end_;
      end_ = walk_.offsets[group_ + 1];
      row_tiles_ = end_ > begin_ ? (end_ - begin_ + kTileM - 1) / kTileM : 0;
      count_ = TileNumbers<kBlocks>{row_tiles_, column_tiles_}.count();
    }
    const TilePosition at = TileNumbers<kBlocks>{row_tiles_, column_tiles_}.at(number - before_, walk_.block);
    const int first = begin_ + at.row * kTileM;
    *found = {.group = group_,
              .first_row = first,
              .rows_left = end_ - first,
              .first_column = at.column * kColumns,
              .depth_begin = 0,
              .depth_end = walk_.depth,
              .shared = at.shared};
    return true;
  }

 private:
  TileWalk walk_;
  int column_tiles_;
  int group_ = -1, begin_ = 0, end_ = 0, row_tiles_ = 0;
  int count_ = 0;   // numbers of this group
  int before_ = 0;  // of those before it
};

// Every group has a C of its own, (height, width); its rows are what is summed over.
template <int kTileM, int kColumns, int kBlocks>
class WeightTiles {
 public:
  explicit __device__ WeightTiles(const TileWalk& walk)
      : walk_(walk),
        tiles_{(walk.height + kTileM - 1) / kTileM, (walk.width + kColumns - 1) / kColumns},
        each_(tiles_.count()) {}
  [[nodiscard]] __device__ bool find(int number, GroupedTile* found) {
    const int group = number / each_;
    if (group >= walk_.groups) return false;
    const TilePosition at = tiles_.at(number - group * each_, walk_.block);
    const int begin = walk_.offsets[group];
    const int end = walk_.offsets[group + 1];
    *found = {.group = group,
              .first_row = at.row * kTileM,
              .rows_left = walk_.height - at.row * kTileM,
              .first_column = at.column * kColumns,
              .depth_begin = begin,
              .depth_end = end > begin ? end : begin,
              .shared = at.shared};
    return true;
  }

 private:
  TileWalk walk_;
  TileNumbers<kBlocks> tiles_;
  int each_;
};

}  // namespace terrace::trainer::cuda
