// shrink and expand of lora.cu on tensor cores, for 16-bit elements: mma.m16n8k16 with float32 sums. A CTA
// computes tiles of 64 rows; its eight warps are 4 (16 rows each) x 2 (turns of 16 columns).

constexpr int TILE_ROWS = 64;
constexpr int TILE_COLUMNS = 8 * CHUNK;
constexpr int STEP = 32;    // of k, in shrink_tiles
constexpr int STAGES = 3;   // of the pipeline from global memory
constexpr int RANKS = 64;   // that expand_tiles multiplies at once; a smaller rank is one block
constexpr int X_PITCH = STEP + PAD;
constexpr int T_PITCH = RANKS + PAD;
constexpr int WIDE_PITCH = TILE_COLUMNS + PAD;

// A warp's place: its first row in the tile, and whether it takes the even or the odd 16 columns.
struct Place {
  int row;
  int turn;
  DEVICE int columns(int pair) const { return (2 * pair + turn) * 16; }
};

DEVICE Place place_of_warp() {
  const int warp = threadIdx.x / 32;
  return {warp % 4 * 16, warp / 4};
}

// The address that a lane gives for 16 x 16 elements whose first is `from`.
template <class T> DEVICE const T* matrix_row(const T* from, int pitch) {
  const int lane = threadIdx.x % 32;
  return from + lane % 16 * pitch + lane / 16 * 8;
}

// Brings a strip to shared memory, zeros behind its end.
template <class T> DEVICE void stage(T* to, const T* from, int valid, bool whole) {
  if (whole && valid == WIDTH<T>) copy16(to, from);
  else *reinterpret_cast<Pack*>(to) = gather(from, valid);
}

// One step of k in shared memory.
template <class T> struct alignas(16) Step {
  T x[TILE_ROWS * X_PITCH];
  T a[STEP * WIDE_PITCH];
};

// Each thread stages the same strip of A at every step, and one of x.
template <class T>
DEVICE void stage_step(Step<T>& to, const Group& group, int row0, const Strip<T>& strip, int k, int end) {
  const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 8;
  const T* x = static_cast<const T*>(group.x) + offset(row0 + row, group.k) + k + column;
  const int valid = row0 + row < group.m ? at_least(at_most(end - k - column, 8), 0) : 0;
  stage(to.x + row * X_PITCH + column, x, valid, group.k % 8 == 0 && is_aligned(group.x));
#pragma unroll
  for (int i = threadIdx.x / CHUNK; i < STEP; i += THREADS / CHUNK)
    stage(to.a + i * WIDE_PITCH + threadIdx.x % CHUNK * 8, strip.first + offset(k + i, strip.stride),
          k + i < end ? strip.valid : 0, strip.whole);
}

// sum [16 rows of the warp, its columns] += x @ A of one step.
template <class T> DEVICE void multiply_step(float (&sum)[8][4], const Step<T>& step, Place place, int strips) {
#pragma unroll
  for (int k = 0; k < STEP; k += 16) {
    unsigned x[4], a[4];
    load_matrices(x, matrix_row(step.x + place.row * X_PITCH + k, X_PITCH));
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (place.columns(pair) < 8 * strips) {
        load_matrices_across(a, matrix_row(step.a + k * WIDE_PITCH + place.columns(pair), WIDE_PITCH));
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
DEVICE void spread(float* to, const float (&sum)[8][4], Place place) {
#pragma unroll
  for (int tile = 0; tile < 8; ++tile)
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int column = place.columns(tile / 2) + tile % 2 * 8 + column_of_part(part);
      to[(place.row + row_of_part(part)) * WIDE_PITCH + column] = sum[tile][part];
    }
}

// A tile's x is read once, or by CTAs side by side where the columns are more than a chunk.
// Shared memory: STAGES steps, then a part.
template <class T> DEVICE void shrink_tiles(const Group& group) {
  Step<T>* steps = reinterpret_cast<Step<T>*>(shared_memory());
  float* part = reinterpret_cast<float*>(shared_memory());
  const Share mine = share_of_cta<T>(group, TILE_ROWS, STEP);
  const int strips = at_most(count_strips<T, Of::A>(group) - mine.first_strip, CHUNK);
  const Strip<T> strip = strip_of<T, Of::A>(group, mine.first_strip + threadIdx.x % CHUNK);
  const int count = ceil_div(mine.k.end - mine.k.first, STEP);
  const Place place = place_of_warp();
  const auto stage_next = [&](int i) {
    if (i < count) stage_step(steps[i % STAGES], group, mine.row0, strip, mine.k.first + i * STEP, mine.k.end);
    close_copies();
  };
  float sum[8][4] = {};
  for (int i = 0; i < STAGES - 1; ++i) stage_next(i);
  for (int i = 0; i < count; ++i) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // step i has come for all threads, and all have left step i - 1
    stage_next(i + STAGES - 1);
    if (mine.row0 + place.row < group.m) multiply_step(sum, steps[i % STAGES], place, strips);
  }
  __syncthreads();
  spread(part, sum, place);
  save_parts<T>(group, mine, TILE_ROWS, part);
}

// A block of t as two 16-bit numbers each, t = scale (high + low): 22 bits of a Float16 pair and 16 of a
// BFloat16 pair. The scale, a power of two for each row, keeps a large t inside the range of Float16.
template <class T> struct alignas(16) Block {
  float scale[TILE_ROWS];
  T high[TILE_ROWS * T_PITCH];
  T low[TILE_ROWS * T_PITCH];
  T b[RANKS * WIDE_PITCH];
};

// Four lanes split a row of t: `ranks` columns from `column`, zeros behind them and below m.
template <class T> DEVICE void split_t(Block<T>& to, const Group& group, int row0, int column, int ranks) {
  const int local = threadIdx.x / 4;
  float t[RANKS / 4] = {};
  for (int split = 0; split < group.splits && row0 + local < group.m; ++split) {
    const float* sums = sums_of(group, split, row0 + local) + column;
#pragma unroll
    for (int i = 0; i < RANKS / 4; ++i) {
      const int rank = threadIdx.x % 4 + 4 * i;
      if (rank < ranks) t[i] += read(sums + rank);
    }
  }
  float largest = 0.0f;  // of the finite ones
#pragma unroll
  for (int i = 0; i < RANKS / 4; ++i) {
    const unsigned magnitude = bits_of(t[i]) & 0x7FFFFFFFu;
    if (magnitude < 0x7F800000u && float_of(magnitude) > largest) largest = float_of(magnitude);
  }
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    const float other = shuffle_xor(largest, mask);
    if (other > largest) largest = other;
  }
  const unsigned exponent = bits_of(largest) >> 23 < 15u ? 15u : bits_of(largest) >> 23;
  if (threadIdx.x % 4 == 0) to.scale[local] = float_of((exponent - 14) << 23);
#pragma unroll
  for (int i = 0; i < RANKS / 4; ++i) {
    const float scaled = t[i] * float_of((268 - exponent) << 23);  // below 2^15
    const int at = local * T_PITCH + threadIdx.x % 4 + 4 * i;
    round_to(to.high[at], scaled);
    const float rest = scaled - widen(to.high[at]);
    round_to(to.low[at], rest == rest ? rest : 0.0f);  // no rest where t is not finite
  }
}

template <class T> DEVICE void stage_b(Block<T>& to, const Strip<T>& strip, int first, int ranks) {
  for (int i = threadIdx.x / CHUNK; i < ceil_div(ranks, 16) * 16; i += THREADS / CHUNK)
    stage(to.b + i * WIDE_PITCH + threadIdx.x % CHUNK * 8, strip.first + offset(first + i, strip.stride),
          i < ranks ? strip.valid : 0, strip.whole);
}

// sum [16 rows of the warp, its columns] += t @ B of one block.
template <class T>
DEVICE void multiply_block(float (&sum)[8][4], const Block<T>& block, Place place, int ranks, int columns) {
  float product[8][4] = {};
  for (int rank = 0; rank < ranks; rank += 16) {
    unsigned high[4], low[4], b[4];
    load_matrices(high, matrix_row(block.high + place.row * T_PITCH + rank, T_PITCH));
    load_matrices(low, matrix_row(block.low + place.row * T_PITCH + rank, T_PITCH));
#pragma unroll
    for (int pair = 0; pair < 4; ++pair)
      if (place.columns(pair) < columns) {
        load_matrices_across(b, matrix_row(block.b + rank * WIDE_PITCH + place.columns(pair), WIDE_PITCH));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          multiply(product[2 * pair + half], low, b[2 * half], b[2 * half + 1], T{});
          multiply(product[2 * pair + half], high, b[2 * half], b[2 * half + 1], T{});
        }
      }
  }
#pragma unroll
  for (int tile = 0; tile < 8; ++tile)
#pragma unroll
    for (int part = 0; part < 4; ++part)
      sum[tile][part] += block.scale[place.row + row_of_part(part)] * product[tile][part];
}

// The tile's sums go through shared memory, so that y and out move in whole strips.
template <class T>
DEVICE void write_tile(const Group& group, const Site& site, int row0, int start, const float (&sum)[8][4],
                       Place place) {
  float* tile = reinterpret_cast<float*>(shared_memory());
  spread(tile, sum, place);
  __syncthreads();
  for (int i = threadIdx.x; i < TILE_ROWS * CHUNK; i += THREADS) {
    const int row = i / CHUNK, column = i % CHUNK * 8;
    const int valid = at_most(site.n - start - column, 8);
    if (row0 + row < group.m && valid > 0)
      write_strip<T>(site, row0 + row, start + column, valid, tile + row * WIDE_PITCH + column);
  }
}

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

// Grid: [tiles of 64 rows x tiles of B]. Shared memory: a block, then the tile of sums.
template <class T> DEVICE void expand_tiles(const Group& group) {
  Block<T>& block = *reinterpret_cast<Block<T>*>(shared_memory());
  const TileOfB tile = tile_of_b(group, blockIdx.x);
  const int row0 = blockIdx.x / tile.tiles * TILE_ROWS;
  const Site& site = group.site[tile.site];
  const Factors<T> factors = factors_of<T>(site);
  const Strip<T> strip = strip_at<T, Of::B>(group, tile.site, tile.start + threadIdx.x % CHUNK * 8);
  const Place place = place_of_warp();
  const bool busy = row0 + place.row < group.m;
  float sum[8][4] = {};
  for (int first = 0; first < factors.rank; first += RANKS) {
    const int ranks = at_most(factors.rank - first, RANKS);
    stage_b(block, strip, first, ranks);
    close_copies();
    split_t(block, group, row0, site.column + first, ranks);
    wait_for_copies<0>();
    __syncthreads();
    if (busy) multiply_block(sum, block, place, ranks, at_most(site.n - tile.start, TILE_COLUMNS));
    __syncthreads();
  }
  write_tile<T>(group, site, row0, tile.start, sum, place);
}
