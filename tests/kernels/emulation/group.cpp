// Behind the LoRA kernels, before emulation.cpp.
using Argument = Group;

// The compiler's layout of Group: its size, Site's size and the offset of each member, in order; then that of Stacks.
extern "C" void layout(int* to) {
  const size_t offsets[] = {
      sizeof(Group), sizeof(Site), offsetof(Group, x), offsetof(Group, workspace), offsetof(Group, m),
      offsetof(Group, k), offsetof(Group, sites), offsetof(Group, total_rank), offsetof(Group, splits),
      offsetof(Group, rank_tiles), offsetof(Group, site), offsetof(Group, stacks),
      offsetof(Group, taken), offsetof(Site, a), offsetof(Site, b), offsetof(Site, y),
      offsetof(Site, out), offsetof(Site, n), offsetof(Site, rank), offsetof(Site, column), offsetof(Site, rank_tile),
      offsetof(Site, of_ranks), offsetof(Site, stride), sizeof(Stacks), offsetof(Stacks, slot), offsetof(Stacks, rank),
      offsetof(Stacks, slots), offsetof(Stacks, sites), offsetof(Stacks, columns), offsetof(Stacks, column_tiles)};
  for (size_t offset : offsets) *to++ = int(offset);
}
