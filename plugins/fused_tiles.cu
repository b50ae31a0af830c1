// fused of lora.cu on tensor cores, for 16-bit elements and a group whose columns are one chunk.

constexpr int FEWEST_STRIPS = 4;  // of a step: with fewer, STAGES of them would not fit shared memory

// Shared memory once the shrink has left it.
template <class T> struct alignas(16) Fused {
  float part[MMA_ROWS * WIDE_PITCH];
  float t[MMA_ROWS * TILE_COLUMNS];  // [MMA_ROWS, columns]
  Block<T, MMA_ROWS> block;
  float sums[MMA_ROWS * WIDE_PITCH];
};

// t in shared memory; rows below m are zeros.
struct SharedT {
  const float* t;
  int columns;
  template <int Rows> DEVICE LaneOfT<Rows> lane(int column, int ranks) const {
    LaneOfT<Rows> some;
    const float* row = t + some.row() * columns + column;
    some.add(ranks, [&](int rank) { return row[rank]; });
    return some;
  }
};

// B does not wait for the shrink: fetch its tiles while x @ A is computed.
template <class T> DEVICE void prefetch_tiles(const Group& group, Span tiles) {
  for (int index = tiles.first; index < tiles.end; ++index) {
    const TileOfB tile = tile_of_b(group, index);
    const Strip<T> strip = strip_of_thread<T>(group, tile);
    const int rank = strip.valid ? factors_of<T>(group.site[tile.site]).rank : 0;
    for (int row = threadIdx.x / COLUMN_TILE_VECTORS; row < rank; row += THREADS / COLUMN_TILE_VECTORS)
      prefetch(strip.first + offset(row, strip.stride));
  }
}

// part [MMA_ROWS, strips] = x [tile, k] @ A [k, strips]. Warps that the columns leave over share a step's k.
template <class T> DEVICE void shrink_few_rows(const Group& group, const Share& mine, float* part) {
  const int strips = count_strips<T, Of::A>(group);
  const Step<MMA_ROWS> step = {at_least(power_of_two_from(strips), FEWEST_STRIPS)};
  const int turns = step.strips / 2, warp = threadIdx.x / 32;
  float* copies = part + MMA_ROWS * WIDE_PITCH;
  Sums<MMA_ROWS> sum = {};
  const Place<MMA_ROWS> place = {0, warp % turns, warp / turns * K_STEP};
  shrink_tile<T, MMA_ROWS>(sum, group, mine, step, place);
  spread<MMA_ROWS>(copies + warp / turns * MMA_ROWS * WIDE_PITCH, sum, place);
  __syncthreads();
  add_copies<T>(copies, WARPS / turns, MMA_ROWS * WIDE_PITCH, strips * 8, part);
}

// Everything in one launch. Grid: [CTAs of all clusters, tiles of 16 rows]. Every cluster computes all of t,
// as in fused, and its CTAs share out the tiles of B.
template <class T> DEVICE void fused_tiles(const Group& group) {
  Fused<T>& memory = *reinterpret_cast<Fused<T>*>(shared_memory());
  const int row0 = blockIdx.y * MMA_ROWS;
  const Span tiles = share(tile_of_b(group, 0).tiles, gridDim.x, blockIdx.x, 1);
  prefetch_tiles<T>(group, tiles);
  shrink_few_rows<T>(group, {row0, 0, share(group.k, cluster_size(), cluster_rank(), K_STEP)}, memory.part);
  cluster_arrive();
  cluster_wait();
  const auto keep = [&](int row, int column, float value) { memory.t[row * group.columns + column] = value; };
  add_parts<T>(group, 0, memory.part, {0, MMA_ROWS * COLUMNS<T>}, keep);
  cluster_arrive();  // said early, awaited late: a CTA may leave once nobody reads its part
  __syncthreads();
  const SharedT t = {memory.t, group.columns};
  for (int tile = tiles.first; tile < tiles.end; ++tile)
    expand_tile(group, row0, tile_of_b(group, tile), t, memory.block, memory.sums);
  cluster_wait();
}
