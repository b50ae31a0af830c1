// Fused shrink and expand on tensor cores, for 16-bit elements and a total rank of at most one column tile.

constexpr int FEWEST_VECTORS = 4;  // of a step: with fewer, STAGES of them would not fit shared memory

// Shared memory once the shrink has left it.
template <class T> struct alignas(16) Fused {
  float part[MMA_ROWS * WIDE_PITCH];
  float t[MMA_ROWS * TILE_COLUMNS];  // [MMA_ROWS, total_rank]
  Block<T, MMA_ROWS> block;
  float sums[MMA_ROWS * WIDE_PITCH];
};

// t in shared memory; rows below m are zeros.
struct SharedT {
  const float* t;
  int total_rank;
  template <int Rows> DEVICE LaneOfT<Rows> lane(int column, int ranks) const {
    LaneOfT<Rows> some;
    const float* row = t + some.row() * total_rank + column;
    some.add(ranks, [&](int rank) { return row[rank]; });
    return some;
  }
};

// B does not wait for the shrink: fetch its tiles while x @ A is computed.
template <class T> DEVICE void prefetch_tiles(const Group& group, Range tiles) {
  for (int index = tiles.first; index < tiles.end; ++index) {
    const TileOfB tile = tile_of_b(group, index);
    const Vector<T> vector = vector_of_thread<T>(group, tile);
    const int rank = vector.valid ? factors_of<T>(group.site[tile.site]).rank : 0;
    for (int row = threadIdx.x / COLUMN_TILE_VECTORS; row < rank; row += THREADS / COLUMN_TILE_VECTORS)
      prefetch(vector.first + offset(row, vector.stride));
  }
}

// part [MMA_ROWS, vectors] = x [tile, k] @ A [k, vectors]. Warps that the columns leave over split a step's k.
template <class T> DEVICE void shrink_few_rows(const Group& group, const ShrinkRange& mine, float* part) {
  const int vectors = count_vectors<T, Of::A>(group);
  const Step<MMA_ROWS> step = {at_least(power_of_two_from(vectors), FEWEST_VECTORS)};
  const int column_slots = step.vectors / 2, warp = threadIdx.x / 32;
  float* copies = part + MMA_ROWS * WIDE_PITCH;
  Sums<MMA_ROWS> sum = {};
  const WarpTile<MMA_ROWS> warp_tile = {0, warp % column_slots, warp / column_slots * K_STEP};
  shrink_tile<T, MMA_ROWS>(sum, group, mine, step, warp_tile);
  store_accumulators<MMA_ROWS>(copies + warp / column_slots * MMA_ROWS * WIDE_PITCH, sum, warp_tile);
  __syncthreads();
  add_copies<T>(copies, WARPS / column_slots, MMA_ROWS * WIDE_PITCH, vectors * 8, part);
}

// Everything in one launch. Grid: [CTAs of all clusters, tiles of 16 rows]. Every cluster computes all of t,
// as in fused, and its CTAs split the tiles of B.
template <class T> DEVICE void fused_tiles(const Group& group) {
  Fused<T>& memory = *reinterpret_cast<Fused<T>*>(tile_memory());
  const int row0 = blockIdx.y * MMA_ROWS;
  const Range tiles = split_range(tile_of_b(group, 0).tiles, gridDim.x, blockIdx.x, 1);
  prefetch_tiles<T>(group, tiles);
  const ShrinkRange mine = {row0, 0, split_range(group.k, cluster_size(), cluster_rank(), K_STEP)};
  if (!HAS_SLOTS || group.total_rank) shrink_few_rows<T>(group, mine, memory.part);
  cluster_arrive();
  cluster_wait();
  const auto keep = [&](int row, int column, float value) { memory.t[row * group.total_rank + column] = value; };
  add_parts<T>(group, 0, memory.part, {0, MMA_ROWS * COLUMNS<T>}, keep);
  __syncthreads();
  cluster_arrive_relaxed();  // said early, awaited late: a CTA may leave once nobody reads its part
  const SharedT t = {memory.t, group.total_rank};
  for (int index = tiles.first; index < tiles.end; ++index) {
    const TileOfB tile = tile_of_b(group, index);
    // All have left the sums of the tile before: a site without a rank writes its own at once, where the others have
    // passed the barriers of their blocks. Only for such a site, which only slots have: no other tile waits once more.
    if (HAS_SLOTS && group.site[tile.site].rank == 0) __syncthreads();
    expand_tile(group, row0, tile, t, memory.block, memory.sums);
  }
  cluster_wait();
}
