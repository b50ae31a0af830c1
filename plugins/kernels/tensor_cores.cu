// Shrink and expand GEMMs on tensor cores, for 16-bit elements: mma.m16n8k16 with float32 accumulators. A CTA
// computes tiles of 64 rows, or of 16 in tensor_cores_fused.cu; its eight warps are so many times 16 rows, and
// slots of 16 columns.

static_assert(TILE_COLUMNS == 8 * COLUMN_TILE_VECTORS);

constexpr int T_PITCH = RANK_BLOCK + PAD;
constexpr int WIDE_PITCH = TILE_COLUMNS + PAD;

template <int Rows> constexpr int COLUMN_SLOTS = WARPS / (Rows / 16);  // of warps, at the columns of a tile
template <int Rows> constexpr int PAIRS = 8 / COLUMN_SLOTS<Rows>;      // of 8 columns, in each warp's slots
template <int Rows> using Sums = float[2 * PAIRS<Rows>][4];     // of a warp

// What of a tile a warp multiplies: from which row on, which slot of columns, from which k of a step on.
template <int Rows> struct WarpTile {
  int row;
  int column_slot;
  int k;
  DEVICE int columns(int pair) const { return (COLUMN_SLOTS<Rows> * pair + column_slot) * 16; }
};

template <int Rows> DEVICE WarpTile<Rows> own_warp_tile() {
  const int warp = threadIdx.x / 32;
  return {warp % (Rows / 16) * 16, warp / (Rows / 16), 0};
}

// The address that a lane gives for 16 x 16 elements whose first is `from`.
template <class T> DEVICE const T* matrix_row(const T* from, int pitch) {
  const int lane = threadIdx.x % 32;
  return from + lane % 16 * pitch + lane / 16 * 8;
}

// Brings a vector to shared memory, zeros behind its end.
template <class T> DEVICE void stage(T* to, const T* from, int valid, bool whole) {
  if (whole && valid == WIDTH<T>) copy16(to, from);
  else *reinterpret_cast<Pack*>(to) = gather(from, valid);
}

// A step of k in shared memory, x [Rows, k] and then A [k, vectors]. The fewer vectors, the longer the step:
// each thread stages two vectors of A whatever the rank, so that as many loads are under way.
template <int Rows> struct Step {
  int vectors;  // of A: a power of two up to COLUMN_TILE_VECTORS

  DEVICE int k() const { return K_STEP * COLUMN_TILE_VECTORS / vectors; }
  DEVICE int x_pitch() const { return k() + PAD; }
  DEVICE int a_pitch() const { return vectors * 8 + PAD; }
  DEVICE int a() const { return Rows * x_pitch(); }
  DEVICE int size() const { return a() + k() * a_pitch(); }
};

// Each thread stages the same vector of A at every step, and perhaps one of x.
template <class T, int Rows>
DEVICE void stage_step(T* to, Step<Rows> step, const Group& group, int row0, const Vector<T>& vector, int k, int end) {
  const int row = threadIdx.x / (step.k() / 8), column = threadIdx.x % (step.k() / 8) * 8;
  if (row < Rows) {
    const T* x = static_cast<const T*>(group.x) + offset(row0 + row, group.k) + k + column;
    const int valid = TileRows(group, row0).has(row) ? at_least(at_most(end - k - column, 8), 0) : 0;
    stage(to + row * step.x_pitch() + column, x, valid, group.k % 8 == 0 && is_aligned(group.x));
  }
  T* a = to + step.a() + threadIdx.x % step.vectors * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = half * (step.k() / 2) + threadIdx.x / step.vectors;
    stage(a + i * step.a_pitch(), vector.first + offset(k + i, vector.stride), k + i < end ? vector.valid : 0,
          vector.whole);
  }
}

// sum [16 rows of the warp, its columns] += x @ A of the warp's k of one step.
template <class T, int Rows>
DEVICE void multiply_step(Sums<Rows>& sum, const T* from, Step<Rows> step, WarpTile<Rows> warp_tile, int vectors) {
#pragma unroll
  for (int k = 0; k < K_STEP; k += 16) {
    unsigned x[4], a[4];
    load_matrices(x, matrix_row(from + warp_tile.row * step.x_pitch() + warp_tile.k + k, step.x_pitch()));
#pragma unroll
    for (int pair = 0; pair < PAIRS<Rows>; ++pair) {
      if (warp_tile.columns(pair) < 8 * vectors) {
        const T* first = from + step.a() + (warp_tile.k + k) * step.a_pitch() + warp_tile.columns(pair);
        load_matrices_across(a, matrix_row(first, step.a_pitch()));
        multiply(sum[2 * pair], x, a[0], a[1], T{});
        multiply(sum[2 * pair + 1], x, a[2], a[3], T{});
      }
    }
  }
}

// The row and column within 16 x 8 of part 0 to 3 of a sum.
DEVICE int row_of_part(int part) { return threadIdx.x % 32 / 4 + part / 2 * 8; }
DEVICE int column_of_part(int part) { return threadIdx.x % 4 * 2 + part % 2; }

// A warp's sums to shared memory, as rows of the tile.
template <int Rows> DEVICE void store_accumulators(float* to, const Sums<Rows>& sum, WarpTile<Rows> warp_tile) {
#pragma unroll
  for (int tile = 0; tile < 2 * PAIRS<Rows>; ++tile)
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int column = warp_tile.columns(tile / 2) + tile % 2 * 8 + column_of_part(part);
      to[(warp_tile.row + row_of_part(part)) * WIDE_PITCH + column] = sum[tile][part];
    }
}

// sum += x [tile, k] @ A [k, vectors of a column tile]. Shared memory, which is free afterwards: STAGES steps.
template <class T, int Rows>
DEVICE void shrink_tile(Sums<Rows>& sum, const Group& group, const ShrinkRange& mine, Step<Rows> step,
                        WarpTile<Rows> warp_tile) {
  T* steps = reinterpret_cast<T*>(tile_memory());
  const int vectors = at_most(count_vectors<T, Of::A>(group) - mine.first_vector, COLUMN_TILE_VECTORS);
  const Vector<T> vector = vector_of<T, Of::A>(group, mine.first_vector + threadIdx.x % step.vectors);
  const int count = ceil_div(mine.k.end - mine.k.first, step.k());
  const TileRows rows(group, mine.row0);
  const auto stage_next = [&](int i) {
    T* to = steps + i % STAGES * step.size();
    if (i < count) stage_step(to, step, group, mine.row0, vector, mine.k.first + i * step.k(), mine.k.end);
    close_copies();
  };
  for (int i = 0; i < STAGES - 1; ++i) stage_next(i);
  for (int i = 0; i < count; ++i) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // step i has come for all threads, and all have left step i - 1
    stage_next(i + STAGES - 1);
    if (rows.has_some(warp_tile.row))
      multiply_step(sum, steps + i % STAGES * step.size(), step, warp_tile, vectors);
  }
  __syncthreads();
}

// A tile's x is read once, or by CTAs side by side where the columns are more than a column tile.
// Shared memory: STAGES steps, then a part.
template <class T> DEVICE void shrink_tiles(const Group& group) {
  float* part = reinterpret_cast<float*>(tile_memory());
  const ShrinkRange mine = shrink_range_of_cta<T>(group, TILE_ROWS, K_STEP);
  if (HAS_SLOTS && mine.first_vector >= count_vectors<T, Of::A>(group)) return;  // of the stacks, not the adapter
  const WarpTile<TILE_ROWS> warp_tile = own_warp_tile<TILE_ROWS>();
  Sums<TILE_ROWS> sum = {};
  shrink_tile<T, TILE_ROWS>(sum, group, mine, {COLUMN_TILE_VECTORS}, warp_tile);
  store_accumulators<TILE_ROWS>(part, sum, warp_tile);
  save_parts<T>(group, mine, TILE_ROWS, part);
}

// A block of t as two 16-bit numbers each, t = scale (high + low): 22 bits of a Float16 pair and 16 of a
// BFloat16 pair. The scale, a power of two for each row, keeps a large t inside the range of Float16.
template <class T, int Rows> struct alignas(16) Block {
  float scale[Rows];
  T high[Rows * T_PITCH];
  T low[Rows * T_PITCH];
  T b[RANK_BLOCK * WIDE_PITCH];
};

template <int Rows> constexpr int LANES = THREADS / Rows;  // that share a row of t

// What a lane has of a row of t: every LANES-th of RANK_BLOCK columns, zeros behind the last.
template <int Rows> struct LaneOfT {
  float value[RANK_BLOCK / LANES<Rows>] = {};

  DEVICE static int row() { return threadIdx.x / LANES<Rows>; }
  DEVICE static int rank(int i) { return threadIdx.x % LANES<Rows> + i * LANES<Rows>; }

  template <class From> DEVICE void add(int ranks, const From& from) {
#pragma unroll
    for (int i = 0; i < RANK_BLOCK / LANES<Rows>; ++i)
      if (rank(i) < ranks) value[i] += from(rank(i));
  }
};

// t as the workspace has it, from a tile's first row on; zeros for rows that are not computed.
struct SplitsOfT {
  const Group& group;
  int row0;
  template <int Rows> DEVICE LaneOfT<Rows> lane(int column, int ranks) const {
    LaneOfT<Rows> t;
    const bool is_mine = TileRows(group, row0).has(t.row());
    for (int split = 0; split < group.splits && is_mine; ++split) {
      const float* sums = sums_of(group, split, row0 + t.row()) + column;
      t.add(ranks, [&](int rank) { return read(sums + rank); });
    }
    return t;
  }
};

// The magnitude of a finite value; zero for others.
DEVICE float finite_magnitude(float value) {
  const unsigned magnitude = bits_of(value) & 0x7FFFFFFFu;
  return magnitude < 0x7F800000u ? float_of(magnitude) : 0.0f;
}

// The exponent of the largest of a row that `Lanes` lanes share, 15 at least. Scaled by it a row is below 2^15.
template <int Lanes> DEVICE unsigned shared_exponent(float largest) {
#pragma unroll
  for (int mask = 1; mask < Lanes; mask *= 2) {
    const float other = shuffle_xor(largest, mask);
    if (other > largest) largest = other;
  }
  return bits_of(largest) >> 23 < 15u ? 15u : bits_of(largest) >> 23;
}

DEVICE float scale_of(unsigned exponent) { return float_of((exponent - 14) << 23); }

// value = scale_of(exponent) (high + low)
template <class T> DEVICE void split_number(T& high, T& low, float value, unsigned exponent) {
  const float scaled = value * float_of((268 - exponent) << 23);
  round_to(high, scaled);
  const float rest = scaled - widen(high);
  round_to(low, rest == rest ? rest : 0.0f);  // no rest where the value is not finite
}

template <class T, int Rows> DEVICE void split_t(Block<T, Rows>& to, const LaneOfT<Rows>& t) {
  float largest = 0.0f;
#pragma unroll
  for (float value : t.value)
    if (finite_magnitude(value) > largest) largest = finite_magnitude(value);
  const unsigned exponent = shared_exponent<LANES<Rows>>(largest);
  if (threadIdx.x % LANES<Rows> == 0) to.scale[t.row()] = scale_of(exponent);
#pragma unroll
  for (int i = 0; i < RANK_BLOCK / LANES<Rows>; ++i) {
    const int at = t.row() * T_PITCH + t.rank(i);
    split_number(to.high[at], to.low[at], t.value[i], exponent);
  }
}

template <class T> DEVICE void stage_b(T* to, const Vector<T>& vector, int first, int ranks) {
  for (int i = threadIdx.x / COLUMN_TILE_VECTORS; i < ceil_div(ranks, 16) * 16; i += THREADS / COLUMN_TILE_VECTORS)
    stage(to + i * WIDE_PITCH + threadIdx.x % COLUMN_TILE_VECTORS * 8, vector.first + offset(first + i, vector.stride),
          i < ranks ? vector.valid : 0, vector.whole);
}

// sum [16 rows of the warp, its columns] += t @ B of one block.
template <class T, int Rows>
DEVICE void multiply_block(Sums<Rows>& sum, const Block<T, Rows>& block, WarpTile<Rows> warp_tile, int ranks,
                           int columns) {
  Sums<Rows> product = {};
  for (int rank = 0; rank < ranks; rank += 16) {
    unsigned high[4], low[4], b[4];
    load_matrices(high, matrix_row(block.high + warp_tile.row * T_PITCH + rank, T_PITCH));
    load_matrices(low, matrix_row(block.low + warp_tile.row * T_PITCH + rank, T_PITCH));
#pragma unroll
    for (int pair = 0; pair < PAIRS<Rows>; ++pair)
      if (warp_tile.columns(pair) < columns) {
        load_matrices_across(b, matrix_row(block.b + rank * WIDE_PITCH + warp_tile.columns(pair), WIDE_PITCH));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply(product[2 * pair + half], low, b[2 * half], b[2 * half + 1], T{});
          multiply(product[2 * pair + half], high, b[2 * half], b[2 * half + 1], T{});
        }
      }
  }
#pragma unroll
  for (int tile = 0; tile < 2 * PAIRS<Rows>; ++tile)
#pragma unroll
    for (int part = 0; part < 4; ++part)
      sum[tile][part] += block.scale[warp_tile.row + row_of_part(part)] * product[tile][part];
}

// A tile of an output in whole vectors, whose sums come through shared memory. A thread's vectors of y are all on
// their way before it waits for the sums.
template <class T, int Rows> struct OutputTile {
  static constexpr int VECTORS = Rows * COLUMN_TILE_VECTORS / THREADS;
  Pack y[VECTORS];

  DEVICE static int row(int i) { return (threadIdx.x + i * THREADS) / COLUMN_TILE_VECTORS; }
  DEVICE static int column() { return threadIdx.x % COLUMN_TILE_VECTORS * 8; }

  // Calls handle(i, vector) with those that there are.
  template <class Handle>
  DEVICE static void each_vector(const Group& group, const Site& site, int row0, int start, const Handle& handle) {
    const int valid = at_most(site.n - start - column(), 8);
    const TileRows rows(group, row0);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i)
      if (rows.has(row(i)) && valid > 0)
        handle(i, OutputVector<T>(site, row0 + row(i), start + column(), valid));
  }
  DEVICE void read_y(const Group& group, const Site& site, int row0, int start) {
    each_vector(group, site, row0, start, [&](int i, const OutputVector<T>& output) { y[i] = output.read_y(); });
  }
  DEVICE void write_sums(const Group& group, const Site& site, int row0, int start, const float* tile) const {
    each_vector(group, site, row0, start, [&](int i, const OutputVector<T>& output) {
      output.write_sums(y[i], tile + row(i) * WIDE_PITCH + column());
    });
  }
};

// The site and the first column of a tile of B; tiles are numbered through all sites.
struct TileOfB {
  int tiles;  // of all sites
  int site;
  int start;
};

DEVICE TileOfB tile_of_b(const Group& group, int index) {
  TileOfB found = {};
  for (int s = 0; s < group.sites; ++s) found.tiles += ceil_div(group.site[s].n, TILE_COLUMNS);
  int tile = index % found.tiles;
  while (tile >= ceil_div(group.site[found.site].n, TILE_COLUMNS))
    tile -= ceil_div(group.site[found.site++].n, TILE_COLUMNS);
  found.start = tile * TILE_COLUMNS;
  return found;
}

// The vector of a tile of B that a thread stages.
template <class T> DEVICE Vector<T> vector_of_thread(const Group& group, const TileOfB& tile) {
  return vector_at<T, Of::B>(group, tile.site, tile.start + threadIdx.x % COLUMN_TILE_VECTORS * 8);
}

// Rows of a tile of an output, from t. `sums`, for the tile's, may lie where the block is.
template <class T, int Rows, class RowsOfSums>
DEVICE void expand_tile(const Group& group, int row0, const TileOfB& tile, const RowsOfSums& t, Block<T, Rows>& block,
                        float* sums) {
  const Site& site = group.site[tile.site];
  const Factors<T> factors = factors_of<T>(site);
  const Vector<T> vector = vector_of_thread<T>(group, tile);
  const WarpTile<Rows> warp_tile = own_warp_tile<Rows>();
  Sums<Rows> sum = {};
  for (int first = 0; first < factors.rank; first += RANK_BLOCK) {
    const int ranks = at_most(factors.rank - first, RANK_BLOCK);
    stage_b(block.b, vector, first, ranks);
    close_copies();
    split_t(block, t.template lane<Rows>(site.column + first, ranks));
    wait_for_copies<0>();
    __syncthreads();
    if (TileRows(group, row0).has_some(warp_tile.row))
      multiply_block(sum, block, warp_tile, ranks, at_most(site.n - tile.start, TILE_COLUMNS));
    __syncthreads();
  }
  OutputTile<T, Rows> output;
  output.read_y(group, site, row0, tile.start);
  store_accumulators<Rows>(sums, sum, warp_tile);
  __syncthreads();
  output.write_sums(group, site, row0, tile.start, sums);
}

// Grid: [tiles of 64 rows x tiles of B]. Shared memory: a block, then the tile of sums.
template <class T> DEVICE void expand_tiles(const Group& group) {
  const TileOfB tile = tile_of_b(group, blockIdx.x);
  const int row0 = blockIdx.x / tile.tiles * TILE_ROWS;
  auto& block = *reinterpret_cast<Block<T, TILE_ROWS>*>(tile_memory());
  expand_tile(group, row0, tile, SplitsOfT{group, row0}, block, reinterpret_cast<float*>(tile_memory()));
}
