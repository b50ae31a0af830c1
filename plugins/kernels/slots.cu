// LoRA with an adapter for each row: every kernel of the other files once for each slot that its tile's rows take.
//
// A pass is a `Group` in shared memory, that of one slot: its A, its B, its ranks, and the rows of the tile that take
// it. Rows stay where they are, and a pass leaves out the others: so nothing is sorted, in the step's inputs or here,
// and no bit of a row depends on which slots the others take. The rows of the base model are a pass whose ranks are
// 0: it reads no A and no B. The passes of a tile are shared out along the grid's third axis.

static_assert(HAS_SLOTS && sizeof(Group) <= PASS_BYTES && TILE_ROWS <= 64);

constexpr int BASE = -1;
constexpr int NO_SLOT = 0x7FFFFFFF;

// The slot of a row; any number that is no slot is the base model.
DEVICE int slot_of(const Group& group, int row) {
  const int slot = read(group.stacks.slot + row);
  return unsigned(slot) < unsigned(group.stacks.slots) ? slot : BASE;
}

struct SlotRows {
  int slot;                  // NO_SLOT behind the last
  unsigned long long taken;  // see Group
};

// The rows of a tile that take the next slot behind `slot`.
DEVICE SlotRows rows_of_next_slot(const Group& group, int row0, int rows, int slot) {
  SlotRows next = {NO_SLOT, 0};
#pragma unroll 4
  for (int i = 0; i < at_most(rows, group.m - row0); ++i) {
    const int found = slot_of(group, row0 + i);
    if (found <= slot || found > next.slot) continue;
    if (found < next.slot) next = {found, 0};
    next.taken |= 1ull << i;
  }
  return next;
}

// The rank of the adapter in a slot at a site of the group.
DEVICE int rank_in_slot(const Group& group, int slot, int site) {
  if (slot == BASE) return 0;
  const Site& of = group.site[site];
  const int rank = read(group.stacks.rank + offset(slot, group.stacks.sites) + of.of_ranks);
  return at_least(at_most(rank, of.rank), 0);
}

template <class T> DEVICE const void* in_slot(const void* stack, int slot, int rows, int columns) {
  return static_cast<const T*>(stack) + offset(slot, rows) * columns;
}

template <class T> DEVICE Site site_in_slot(const Group& group, int slot, int site) {
  Site own = group.site[site];
  own.stride = own.rank;
  if (slot != BASE) {
    own.a = in_slot<T>(own.a, slot, group.k, own.stride);
    own.b = in_slot<T>(own.b, slot, own.stride, own.n);
  }
  own.rank = rank_in_slot(group, slot, site);
  return own;
}

// Each site is a thread's; the one behind the last has the sums.
template <class T> DEVICE void write_pass(Group& pass, const Group& group, const SlotRows& rows) {
  const int s = threadIdx.x;
  if (s > group.sites) return;
  int column = 0, rank_tile = 0;
  for (int before = 0; before < s; ++before) {
    const int rank = rank_in_slot(group, rows.slot, before);
    column += rank;
    rank_tile += ceil_div(rank, RANK_TILE);
  }
  if (s < group.sites) {
    pass.site[s] = site_in_slot<T>(group, rows.slot, s);
    pass.site[s].column = column;
    pass.site[s].rank_tile = rank_tile;
    return;
  }
  pass.x = group.x;
  pass.workspace = group.workspace;
  pass.m = group.m;
  pass.k = group.k;
  pass.sites = group.sites;
  pass.total_rank = column;
  pass.splits = group.splits;
  pass.rank_tiles = rank_tile;
  pass.stacks = group.stacks;
  pass.taken = rows.taken;
}

// Calls compute(pass) for every pass of the tile of `rows` rows from row0 on that is this CTA's.
template <class T, class Compute>
DEVICE void each_pass(const Group& group, int row0, int rows, const Compute& compute) {
  Group& pass = *reinterpret_cast<Group*>(shared_memory());
  bool is_first = true;
  SlotRows next = rows_of_next_slot(group, row0, rows, BASE - 1);
  for (int turn = 0; next.slot != NO_SLOT; ++turn) {
    if (turn % int(gridDim.z) == blockIdx.z) {
      if (!is_first) {  // all CTAs of the cluster have left the pass before, and what they read of each other
        cluster_arrive();
        cluster_wait();
      }
      is_first = false;
      write_pass<T>(pass, group, next);
      __syncthreads();
      compute(pass);
    }
    next = rows_of_next_slot(group, row0, rows, next.slot);
  }
}

template <class T, int Rows> DEVICE void slots_fused(const Group& group) {
  each_pass<T>(group, blockIdx.y * Rows, Rows, [](const Group& pass) { fused<T, Rows>(pass); });
}

DEVICE int row_of_shrink(const Group& group, int rows) {
  return blockIdx.x / cluster_size() / group.stacks.column_tiles * rows;
}

template <class T, int Rows> DEVICE void slots_shrink(const Group& group) {
  each_pass<T>(group, row_of_shrink(group, Rows), Rows, [](const Group& pass) { shrink<T, Rows>(pass); });
}

template <class T, int Rows> DEVICE void slots_expand(const Group& group) {
  each_pass<T>(group, blockIdx.x * Rows, Rows, [](const Group& pass) { expand<T, Rows>(pass); });
}

template <class T> DEVICE void slots_fused_tiles(const Group& group) {
  each_pass<T>(group, blockIdx.y * MMA_ROWS, MMA_ROWS, [](const Group& pass) { fused_tiles<T>(pass); });
}

template <class T> DEVICE void slots_shrink_tiles(const Group& group) {
  each_pass<T>(group, row_of_shrink(group, TILE_ROWS), TILE_ROWS, [](const Group& pass) { shrink_tiles<T>(pass); });
}

template <class T> DEVICE void slots_expand_tiles(const Group& group) {
  const int row0 = blockIdx.x / tile_of_b(group, blockIdx.x).tiles * TILE_ROWS;
  each_pass<T>(group, row0, TILE_ROWS, [](const Group& pass) { expand_tiles<T>(pass); });
}

// The passes of a tile of at most 32 rows: each warp finds all of them at once, with a row for each lane.
struct Passes {
  int slot;          // of the lane's row
  unsigned same;     // the rows of that slot
  unsigned leaders;  // the first row of each slot
  int count = 0;

  DEVICE Passes(const Group& group, int row0, int rows) {
    const int lane = threadIdx.x % 32;
    const bool there = lane < rows && row0 + lane < group.m;
    slot = there ? slot_of(group, row0 + lane) : NO_SLOT;
    same = lanes_with(slot);
    const bool leads = there && !(same & (1u << lane) - 1);
    const unsigned alike = lanes_with(leads);
    leaders = leads ? alike : ~alike;
    for (unsigned left = leaders; left; left &= left - 1) ++count;
  }

  DEVICE SlotRows at(int turn) const {
    unsigned left = leaders;
    for (; turn; --turn) left &= left - 1;
    int lane = 0;
    while (!(left >> lane & 1)) ++lane;
    return {of_lane(slot, lane), unsigned(of_lane(int(same), lane))};
  }
};

// The clusters are shared out among the passes, so that all are under way at once, whichever slots the rows take: one
// pass gets `group.splits` of them at most, as many as one adapter for all rows. A pass has its share there.
template <class T, int Tiles> DEVICE void slots_decode(const Group& group) {
  Group& pass = *reinterpret_cast<Group*>(shared_memory());
  const int clusters = gridDim.x / cluster_size(), cluster = blockIdx.x / cluster_size();
  for (int turn = cluster;; turn += clusters) {
    const Passes passes(group, first_row<Tiles>(), ROW_TILE * Tiles);  // again: in registers they would be in the way
    if (turn == cluster) turn %= passes.count;
    if (turn >= passes.count) return;
    const int share = turn < clusters ? at_most(ceil_div(clusters - turn, passes.count), group.splits) : 1;
    const int of_pass = cluster / passes.count;
    if (of_pass >= share) return;
    if (turn >= clusters) {  // all CTAs of the cluster have left the pass before, and what they read of each other
      cluster_arrive();
      cluster_wait();
    }
    write_pass<T>(pass, group, passes.at(turn));
    if (threadIdx.x == group.sites) pass.splits = share;
    __syncthreads();
    decode<T, Tiles>(pass, of_pass * cluster_size() + cluster_rank());
  }
}
