// LoRA of up to 32 rows in one launch on tensor cores, for 16-bit elements. The host has seen to it that x, B, y and
// out are aligned vectors throughout, and A where its rank is a multiple of 8.
//
// The operands of mma.m16n8k16 are swapped: its left one, of 16 rows, is A or B transposed, and its right one,
// of 8 columns, is x or t. So 8 rows of x fill it: a row tile. What is loaded of A and B is multiplied by all `Tiles`
// of them. An mma may sum up in any order: lane 4 g + t takes 8 neighbours of a row of x, and the same rows of A, so
// that one load is the right operand of two.

constexpr int TILE_SUMS = ROW_TILE * RANK_TILE;  // of a rank tile of t, [ROW_TILE, RANK_TILE]
constexpr int CHUNK_SIZE = CHUNK * RANK_TILE;    // elements of A
// The more row tiles, the fewer chunks of x are in registers at once, and with a pass fewer row tiles of y.
template <int Tiles> constexpr int CHUNKS_OF_X = HAS_SLOTS ? CHUNKS / Tiles : Tiles > 2 ? CHUNKS / 2 : CHUNKS;
template <int Tiles> constexpr int TILES_OF_Y = HAS_SLOTS ? 1 : Tiles;
// Sums of a row tile in a shrink, so that no mma waits for the one before.
template <int Tiles> constexpr int SUMS_OF = Tiles > 1 ? 1 : 2;
constexpr int HALF = CHUNK_SIZE / 2;

DEVICE int lane_of_thread() { return threadIdx.x % 32; }
DEVICE int warp_of_thread() { return threadIdx.x / 32; }
DEVICE int lane_group() { return threadIdx.x % 32 / 4; }          // g
DEVICE int lane_in_group() { return threadIdx.x % 4; }            // t
DEVICE int output_row(int i) { return 2 * lane_in_group() + i; }  // of an mma's sums, and so of y and out

// Without signs, and in bytes, it is one instruction.
template <class T> DEVICE T* row_of(T* first, int row, int stride) {
  const auto bytes = static_cast<unsigned long long>(unsigned(row)) * (unsigned(stride) * unsigned(sizeof(T)));
  return (T*)((char*)(first) + bytes);
}

DEVICE int site_of_rank_tile(const Group& group, int tile) {
  int site = 0;
#pragma unroll 1
  while (site + 1 < group.sites && group.site[site + 1].rank_tile <= tile) ++site;
  return site;
}

// ---- shrink: t, transposed, [16 ranks, 8 rows] = A, transposed, @ x, transposed

// Which of a power of two of rank tiles is a warp's, and which of `parts` of its k.
struct WarpShare {
  int shift;

  DEVICE explicit WarpShare(int tiles) : shift((tiles > 1) + (tiles > 2) + (tiles > 4)) {}
  DEVICE int tile() const { return warp_of_thread() & (1 << shift) - 1; }
  DEVICE int part() const { return warp_of_thread() >> shift; }
  DEVICE int parts() const { return WARPS >> shift; }
};

// A chunk of A, [CHUNK, RANK_TILE], in shared memory: rows in the order in which mma wants them, and the two vectors of
// a row swapped in every other four, so that eight rows lie in different banks. A lane stages the 16 bytes of its
// number and those 32 behind: one vector of two rows.
DEVICE int staged_row() { return (threadIdx.x >> 2 & 3) * 8 + (threadIdx.x >> 4 & 1) * 2 + (threadIdx.x >> 1 & 1); }
DEVICE int staged_vector() { return (threadIdx.x ^ threadIdx.x >> 3) & 1; }
constexpr int NEXT_ROW = 4;   // from a lane's first row to its second

// The first of the two for which a lane gives the address to load_matrices_across.
DEVICE int loaded_vector() {
  return (((threadIdx.x >> 4 & 1) * 8 + (threadIdx.x & 7)) * 2 + ((threadIdx.x >> 3 ^ threadIdx.x >> 2) & 1)) * 8;
}

// What a lane stages of a rank tile of A: its vector, in rows from `first` on.
template <class T> struct RankVector {
  const T* first;
  int stride;  // of a row
  int valid;  // elements; none behind the last rank, or where there is no tile
  int rows;   // behind them, or without elements, there are zeros

  DEVICE RankVector(const Group& group, int tile, int end) {
    const Site& site = group.site[site_of_rank_tile(group, tile)];
    const Factors<T> factors = factors_of<T>(site);
    const int start = (tile - site.rank_tile) * RANK_TILE + staged_vector() * 8;
    stride = stride_of_a(site);
    first = row_of(factors.a + start, staged_row(), stride);
    valid = tile < group.rank_tiles ? at_most(factors.rank - start, 8) : 0;
    rows = valid > 0 ? end - staged_row() : 0;
    compute_here(first);
    compute_here(rows);
  }
};

// A chunk of a rank tile, staged by its warp, from row k of A on.
template <class T> DEVICE void stage_chunk(T* to, const RankVector<T>& vector, int k) {
  const T* from = row_of(vector.first, k, vector.stride);
  copy16_or_zeros(to, from, k < vector.rows);
  copy16_or_zeros(to + HALF, row_of(from, NEXT_ROW, vector.stride), k < vector.rows - NEXT_ROW);
}

// CHUNKS where the rank is no multiple of 8, as for an adapter's missing sites, of rank 1: element by element, each of
// all rows at once.
template <class T> DEVICE void stage_odd_chunks(T* to, const RankVector<T>& vector, int k, int step) {
#pragma unroll
  for (int i = 0; i < 2 * CHUNKS; ++i) *reinterpret_cast<Pack*>(to + i * HALF) = {};
#pragma unroll 1
  for (int element = 0; element < vector.valid; ++element) {
    T values[2 * CHUNKS];
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; ++i) {
      const int row = k + i / 2 * step + i % 2 * NEXT_ROW;
      values[i] = row < vector.rows ? read(row_of(vector.first, row, vector.stride) + element) : T{};
    }
#pragma unroll
    for (int i = 0; i < 2 * CHUNKS; ++i) to[i * HALF + element] = values[i];
  }
}

// Of a CTA: with slots, and more rows than fit, the grid's second axis is of groups of row tiles.
template <int Tiles> DEVICE int first_row() {
  return HAS_SLOTS && Tiles > 1 ? int(blockIdx.y) * Tiles * ROW_TILE : 0;
}

// A bit for each row from the first on: whether it is there, and with slots whether it takes this pass.
DEVICE unsigned rows_there(const Group& group) {
  if (HAS_SLOTS) return unsigned(group.taken);
  return group.m < 32 ? (1u << group.m) - 1 : ~0u;
}

// What a lane reads of x: of each row tile, row g; of a row that is not there, zeros.
template <class T, int Tiles> struct LanesOfX {
  const T* first;  // of row tile 0
  int k;
  int end;
  unsigned there;  // see rows_there; the first is row g

  DEVICE LanesOfX(const Group& group, int end_of_k) : k(group.k), end(end_of_k - 8 * lane_in_group()) {
    first = row_of(static_cast<const T*>(group.x), first_row<Tiles>() + lane_group(), k) + 8 * lane_in_group();
    there = rows_there(group) >> lane_group();
    compute_here(first);
    compute_here(end);
  }

  // Of a warp's chunks from `column` on.
  template <int Chunks> DEVICE void load(Pack (&to)[Chunks][Tiles], int column, int step) const {
#pragma unroll
    for (int i = 0; i < Chunks * Tiles; ++i) {
      const int tile = i % Tiles, at = column + i / Tiles * step;
      const bool is_there = at < end && there >> tile * ROW_TILE & 1;
      to[i / Tiles][tile] = is_there ? read16(row_of(first, tile * ROW_TILE, k) + at) : Pack{};
    }
  }
};

// sum [4 of 16 ranks x 8 rows] of each row tile += A, transposed, @ x, transposed, of a chunk.
template <class T, int Tiles, int Sums>
DEVICE void multiply_chunk(float (&sum)[Tiles][Sums][4], const T* loaded, const Pack (&x)[Tiles]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unsigned a[4];  // 8 x 8 each: ranks from 0 and from 8, then the same of 8 more of k
    load_matrices_across(a, loaded + half * HALF);
#pragma unroll
    for (int tile = 0; tile < Tiles; ++tile)
      multiply(sum[tile][half % Sums], a, x[tile].word[2 * half], x[tile].word[2 * half + 1], T{});
  }
}

// The warp's part of its rank tile of t, to [Tiles, ROW_TILE, RANK_TILE]. Shared memory: CHUNKS for each warp.
template <class T, int Tiles>
DEVICE void shrink_rank_tile(const Group& group, Range k, WarpShare share, T* chunks, float* to) {
  constexpr int Some = CHUNKS_OF_X<Tiles>;
  const RankVector<T> vector(group, share.tile(), k.end);
  const LanesOfX<T, Tiles> x(group, k.end);
  int step = share.parts() * CHUNK;
  chunks += warp_of_thread() * CHUNKS * CHUNK_SIZE;
  T *staged = chunks + lane_of_thread() * 8, *loaded = chunks + loaded_vector();
  compute_here(step);
  compute_here(staged);
  compute_here(loaded);
  float sum[Tiles][SUMS_OF<Tiles>][4] = {};
  for (int i = k.first; i < k.end; i += CHUNKS * step) {
    const int first = i + share.part() * CHUNK;
    Pack of_x[Some][Tiles];
    x.load(of_x, first, step);
    if (vector.stride % 8u == 0) {
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) stage_chunk(staged + j * CHUNK_SIZE, vector, first + j * step);
    } else {
      stage_odd_chunks(staged, vector, first, step);
    }
    close_copies();
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
      if (j && j % Some == 0) x.load(of_x, first + j * step, step);
      multiply_chunk<T>(sum, loaded + j * CHUNK_SIZE, of_x[j % Some]);
    }
    __syncthreads();  // the next chunks, or the sums, overwrite them
  }
#pragma unroll
  for (int i = 0; i < 4 * Tiles; ++i) {
    const int tile = i / 4, part = i % 4;
    const int at = output_row(part % 2) * RANK_TILE + part / 2 * 8 + lane_group();
    to[tile * TILE_SUMS + at] = sum[tile][0][part] + (Tiles > 1 ? 0.0f : sum[tile][SUMS_OF<Tiles> - 1][part]);
  }
}

// ---- t. Each rank tile of each row tile has a warp that adds it up: a lane has 4 ranks of row g.

// A rank tile of t as two 16-bit numbers each, two to a word; see Block.
struct alignas(16) SplitTile {
  unsigned high[TILE_SUMS / 2];
  unsigned low[TILE_SUMS / 2];
  float scale[ROW_TILE];
};

DEVICE void add(Four& sum, const Four& value) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.value[i] += value.value[i];
}

// What a lane adds up of a tile's sums.
DEVICE Four* sums_of_lane(float* tiles, int tile) {
  return reinterpret_cast<Four*>(tiles + tile * TILE_SUMS + 4 * lane_of_thread());
}

// The sum of the warps' parts of a tile: row tile `tile % Tiles` of rank tile `tile / Tiles`.
template <int Tiles> DEVICE Four add_warps(float* copies, WarpShare share, int tile) {
  Four sum = {};
#pragma unroll
  for (int copy = 0; copy < WARPS; ++copy)
    if (copy < share.parts()) add(sum, *sums_of_lane(copies, (copy << share.shift) * Tiles + tile));
  return sum;
}

DEVICE Four add_ctas(const Four* part) {
  Four sum = read_remote(part, 0);
#pragma unroll
  for (int rank = 1; rank < cluster_size(); ++rank) add(sum, read_remote(part, rank));
  return sum;
}

// What lies behind the site's ranks counts as zero.
template <class T> DEVICE void split_row(SplitTile& to, Four t, int ranks) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i >= ranks) t.value[i] = 0.0f;
    if (finite_magnitude(t.value[i]) > largest) largest = finite_magnitude(t.value[i]);
  }
  const unsigned exponent = shared_exponent<4>(largest);
  T high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) split_number(high[i], low[i], t.value[i], exponent);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to.high[2 * lane_of_thread() + i] = low_halves(high[2 * i].bits, high[2 * i + 1].bits);
    to.low[2 * lane_of_thread() + i] = low_halves(low[2 * i].bits, low[2 * i + 1].bits);
  }
  if (lane_in_group() == 0) to.scale[lane_group()] = scale_of(exponent);
}

// ---- expand: out, transposed, [16 columns, 8 rows] = B, transposed, @ t, transposed

// What a lane has of UNIT columns of a site: 8 of them, in rows 2 t and 2 t + 1 of y and out.
template <class T, int Tiles> struct Columns {
  int site;   // group.sites behind the last
  int first;
  bool mine;
  Pack b[4];  // rows 4 t to 4 t + 3 of a rank tile
  Pack y[TILES_OF_Y<Tiles>][2];
};

template <class T, int Tiles> DEVICE void load_b(Columns<T, Tiles>& columns, const Site& site, int first_rank) {
  const Factors<T> factors = factors_of<T>(site);
  const int row = first_rank + 4 * lane_in_group();
  const T* b = row_of(factors.b + columns.first, row, site.n);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    columns.b[i] = columns.mine && row + i < factors.rank ? read16(row_of(b, i, site.n)) : Pack{};
}

// With the first rank tile of B.
template <class T, int Tiles> DEVICE Columns<T, Tiles> load_columns(const Group& group, int unit) {
  Columns<T, Tiles> columns;
#pragma unroll 1
  for (columns.site = 0; columns.site < group.sites; ++columns.site) {
    const int units = ceil_div(group.site[columns.site].n, UNIT);
    if (unit < units) break;
    unit -= units;
  }
  if (columns.site == group.sites) return columns;
  const Site& site = group.site[columns.site];
  columns.first = unit * UNIT + 8 * lane_group();
  columns.mine = columns.first < site.n;
  load_b(columns, site, 0);
  return columns;
}

template <class T, int Tiles> DEVICE void load_y(Columns<T, Tiles>& columns, const Group& group, int tile) {
  const Site& site = group.site[columns.site];
  if (columns.site == group.sites || !site.y || !columns.mine) return;
  const int row0 = tile * ROW_TILE + output_row(0);
  const unsigned there = rows_there(group) >> row0;
  const T* y = row_of(static_cast<const T*>(site.y) + columns.first, first_row<Tiles>() + row0, site.n);
#pragma unroll
  for (int i = 0; i < 2 * TILES_OF_Y<Tiles>; ++i) {
    const int row = i / 2 * ROW_TILE + i % 2;
    if (there >> row & 1) columns.y[i / 2][i % 2] = read16(row_of(y, row, site.n));
  }
}

// sum [2 rows, 8 columns] += t @ B of one rank tile.
template <class T> DEVICE void multiply_columns(float (&sum)[2][8], const SplitTile& t, const Pack (&b)[4]) {
  const unsigned* high = t.high + 2 * lane_of_thread();
  const unsigned* low = t.low + 2 * lane_of_thread();
  const float scale[2] = {t.scale[output_row(0)], t.scale[output_row(1)]};
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const unsigned left[4] = {
        low_halves(b[0].word[pair], b[1].word[pair]), high_halves(b[0].word[pair], b[1].word[pair]),
        low_halves(b[2].word[pair], b[3].word[pair]), high_halves(b[2].word[pair], b[3].word[pair])};
    float product[4] = {};
    multiply(product, left, low[0], low[1], T{});
    multiply(product, left, high[0], high[1], T{});
#pragma unroll
    for (int part = 0; part < 4; ++part)
      sum[part % 2][2 * pair + part / 2] += scale[part % 2] * product[part];
  }
}

// `sum` with y, rounded.
template <class T> DEVICE Pack output_of(float (&sum)[8], bool adds, const Pack& y) {
  if (adds) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = add(element(y, j, T{}), sum[j]);
  }
  Pack pack = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    T rounded;
    round_to(rounded, sum[j]);
    put(pack, j, rounded);
  }
  return pack;
}

template <class T, int Tiles>
DEVICE void write_columns(const Group& group, const Columns<T, Tiles>& columns, int tile, float (&sum)[2][8]) {
  const Site& site = group.site[columns.site];
  const int row = tile * ROW_TILE + output_row(0);
  const unsigned there = rows_there(group) >> row;
  T* out = row_of(static_cast<T*>(site.out) + columns.first, first_row<Tiles>() + row, site.n);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (there >> i & 1)
      write16(row_of(out, i, site.n), output_of<T>(sum[i], site.y != nullptr, columns.y[tile % TILES_OF_Y<Tiles>][i]));
}

// A row tile after the other, since the sums of all would not fit registers.
template <class T, int Tiles>
DEVICE void expand_columns(const Group& group, Columns<T, Tiles>& columns, const SplitTile* t) {
  const Site& site = group.site[columns.site];
  t += site.rank_tile * Tiles;
#pragma unroll TILES_OF_Y<Tiles>
  for (int tile = 0; tile < Tiles; ++tile) {
    if (tile && TILES_OF_Y<Tiles> == 1) load_y(columns, group, tile);
    if (tile && site.rank > RANK_TILE) load_b(columns, site, 0);  // else it is there
    float sum[2][8] = {};
#pragma unroll 1
    for (int first = 0; first < site.rank; first += RANK_TILE) {
      if (first) load_b(columns, site, first);
      multiply_columns<T>(sum, t[first / RANK_TILE * Tiles + tile], columns.b);
    }
    if (columns.mine) write_columns(group, columns, tile, sum);
  }
}

// Everything in one launch. Grid: [CTAs of all clusters, groups of row tiles]. Every cluster computes all of t, each of
// its CTAs a part of k.
// Shared memory: the chunks, and when they are multiplied each warp's sums, a part and t.
template <class T, int Tiles> DEVICE void decode(const Group& group, int cta = blockIdx.x) {
  const int ctas = HAS_SLOTS ? group.splits * cluster_size() : gridDim.x;  // that share out the columns
  const int tiles = group.rank_tiles * Tiles;
  auto* copies = reinterpret_cast<float*>(tile_memory());
  float* part = copies + WARPS * Tiles * TILE_SUMS;
  auto* t = reinterpret_cast<SplitTile*>(part + tiles * TILE_SUMS);
  int unit = warp_of_thread() * ctas + cta;
  constexpr bool IsEarly = Tiles <= 2;  // with more, registers are short until the shrink is over
  Columns<T, Tiles> columns;
  if (IsEarly) columns = load_columns<T, Tiles>(group, unit);  // they wait for nothing
  const int length = ceil_div(group.k, cluster_size() * CHUNK) * CHUNK;
  const Range k = {cluster_rank() * length, at_most((cluster_rank() + 1) * length, group.k)};
  const WarpShare share(group.rank_tiles);
  float* own = copies + warp_of_thread() * Tiles * TILE_SUMS;
  if (!HAS_SLOTS || tiles) shrink_rank_tile<T, Tiles>(group, k, share, reinterpret_cast<T*>(copies), own);
  __syncthreads();
  if (!IsEarly) columns = load_columns<T, Tiles>(group, unit);
  const int first_tile = WARPS - 1 - warp_of_thread();  // the last warps have the fewest columns
  for (int tile = first_tile; tile < tiles; tile += WARPS)
    *sums_of_lane(part, tile) = add_warps<Tiles>(copies, share, tile);
  cluster_arrive();
  load_y(columns, group, 0);
  cluster_wait();
  for (int tile = first_tile; tile < tiles; tile += WARPS) {
    const Site& site = group.site[site_of_rank_tile(group, tile / Tiles)];
    const int first = (tile / Tiles - site.rank_tile) * RANK_TILE + 4 * lane_in_group();
    split_row<T>(t[tile], add_ctas(sums_of_lane(part, tile)), factors_of<T>(site).rank - first);
  }
  __syncthreads();
  cluster_arrive_relaxed();  // a CTA may leave once nobody reads its part; nothing is handed over
  while (columns.site < group.sites) {
    expand_columns<T, Tiles>(group, columns, t);
    columns = load_columns<T, Tiles>(group, unit += ctas * WARPS);
    load_y(columns, group, 0);
  }
  cluster_wait();
}
