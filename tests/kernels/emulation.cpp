// The end of the compiled text: what emulator.py calls.

extern "C" int emulate(void (*kernel)(Group), const Group* group, const int* grid, int threads, int shared_bytes,
                       int cluster, const emulation::Range* ranges, int range_count, unsigned order, char* message,
                       int size) {
  using namespace emulation;
  emulation::grid = {grid[0], grid[1], grid[2]};
  block = {threads, 1, 1};
  emulation::ranges = ranges;
  emulation::range_count = range_count;
  emulation::shared_bytes = size_t(shared_bytes);
  error.clear();
  body = [=] { kernel(*group); };
  if (grid[0] % cluster) error = "the grid is no multiple of the cluster";
  for (int z = 0; z < grid[2] && error.empty(); ++z)
    for (int y = 0; y < grid[1] && error.empty(); ++y)
      for (int x = 0; x < grid[0] && error.empty(); x += cluster)
        run_cluster({x, y, z}, cluster, order++);
  std::snprintf(message, size_t(size), "%s", error.c_str());
  return error.empty() ? 0 : 1;
}

// The compiler's layout of Group: its size, Site's size and the offset of each member, in order.
extern "C" void layout(int* to) {
  const size_t offsets[] = {
      sizeof(Group), sizeof(Site), offsetof(Group, x), offsetof(Group, workspace), offsetof(Group, m),
      offsetof(Group, k), offsetof(Group, sites), offsetof(Group, total_rank), offsetof(Group, splits),
      offsetof(Group, rank_tiles), offsetof(Group, site), offsetof(Site, a), offsetof(Site, b), offsetof(Site, y),
      offsetof(Site, out), offsetof(Site, n), offsetof(Site, rank), offsetof(Site, column),
      offsetof(Site, rank_tile)};
  for (size_t offset : offsets) *to++ = int(offset);
}

extern "C" unsigned short narrow(float value, int to_bfloat) {
  return to_bfloat ? emulation::narrow_bfloat(value) : emulation::narrow_half(value);
}

extern "C" float widened(unsigned short bits) { return emulation::widen_half(bits); }
