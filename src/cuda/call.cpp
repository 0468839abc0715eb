#include "cuda/call.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "base/error.h"

namespace jali::cuda {
namespace {

constexpr i64 kAlignment = 256;
constexpr i64 kChunkBytes = 256 << 10;
constexpr i32 kMostCounters = 1024;
constexpr i64 kCounterBytes = kMostCounters * sizeof(i32);
constexpr u64 kAnyStride = 16;  // that nobody follows

/// Device memory that calls of a stream use one after another, for the life of the process: counters, zero
/// between calls, and a chunk for small pieces. Each call holds one until all it does is on the stream, so
/// that the next call's kernels come after its own. PERF: PyTorch takes 1 to 4 us to hand out memory.
class Workspaces {
 public:
  // The last one: CU_STREAM_PER_THREAD is another stream in every thread.
  using Key = std::tuple<int, Stream*, std::thread::id>;

  static Key key(int device, Stream* stream) {
    const bool of_thread = reinterpret_cast<std::uintptr_t>(stream) == 2;
    return {device, stream, of_thread ? std::this_thread::get_id() : std::thread::id()};
  }
  /// One that nobody holds, or 0.
  DevicePtr take(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<DevicePtr>& idle = idle_[key];
    if (idle.empty()) return 0;
    const DevicePtr taken = idle.back();
    idle.pop_back();
    return taken;
  }
  void give_back(const Key& key, DevicePtr workspace) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_[key].push_back(workspace);
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::vector<DevicePtr>> idle_;
};

Workspaces& workspaces() {
  static auto* const all = new Workspaces;  // calls may outlive what is destroyed at exit
  return *all;
}

}  // namespace

Call::Call(const AttentionProblem& problem)
    : problem_(problem),
      guard_(problem.device_index),
      driver_(Driver::get()),
      device_(device_info(problem.device_index)),
      mask_(*problem.mask),
      sequences_(sequences_of(*problem.mask, problem.documents)) {}

Call::~Call() {
  Stream* const stream = static_cast<Stream*>(problem_.stream);
  if (workspace_) {
    workspaces().give_back(Workspaces::key(problem_.device_index, stream), workspace_);
  }
  for (DevicePtr address : own_memory_) {
    driver_.free_async(address, stream);
  }
}

void* Call::allocate(i64 bytes) {
  if (bytes == 0) return nullptr;
  bytes = ceil_div(bytes, kAlignment) * kAlignment;
  if (bytes > kChunkBytes) return allocate_alone(bytes);
  if (bytes > chunk_left_) {
    const bool ours = !chunk_ && hold_workspace();
    chunk_ = ours ? reinterpret_cast<char*>(workspace_) + kCounterBytes
                  : static_cast<char*>(allocate_alone(kChunkBytes));
    chunk_left_ = kChunkBytes;
  }
  chunk_left_ -= bytes;
  return chunk_ + chunk_left_;
}

void* Call::allocate_alone(i64 bytes) {
  if (problem_.allocate) return problem_.allocate(problem_.allocate_context, bytes);
  DevicePtr address = 0;
  driver_.check(driver_.allocate_async(&address, bytes, static_cast<Stream*>(problem_.stream)),
                "allocating a workspace");
  own_memory_.push_back(address);
  return reinterpret_cast<void*>(address);
}

void Call::clear(void* at, i64 bytes) const {
  if (bytes == 0) return;
  driver_.check(driver_.memset_async(reinterpret_cast<DevicePtr>(at), 0, bytes / 4,
                                     static_cast<Stream*>(problem_.stream)),
                "clearing a workspace");
}

const u64* Call::upload(u64 number) {
  void* const at = allocate(sizeof number);
  const DevicePtr address = reinterpret_cast<DevicePtr>(at);
  Stream* const stream = static_cast<Stream*>(problem_.stream);
  // As two fills: nothing on the host need outlive the call.
  for (int half = 0; half < 2; ++half) {
    driver_.check(driver_.memset_async(address + 4 * half,
                                       static_cast<unsigned>(number >> 32 * half), 1, stream),
                  "writing a number");
  }
  return static_cast<const u64*>(at);
}

// A captured graph may run on any stream later.
bool Call::hold_workspace() {
  if (workspace_ || captured_) return workspace_ != 0;
  Stream* const stream = static_cast<Stream*>(problem_.stream);
  int capturing = 0;
  driver_.check(driver_.is_capturing(stream, &capturing), "cuStreamIsCapturing");
  captured_ = capturing != 0;
  if (captured_) return false;
  workspace_ = workspaces().take(Workspaces::key(problem_.device_index, stream));
  if (!workspace_) {
    DevicePtr fresh = 0;
    // In the order of the stream: any other allocation may break another thread's capture.
    driver_.check(driver_.allocate_async(&fresh, kCounterBytes + kChunkBytes, stream),
                  "allocating a workspace");
    driver_.check(driver_.memset_async(fresh, 0, kMostCounters, stream), "clearing counters");
    workspace_ = fresh;
  }
  return true;
}

i32* Call::counters(i32 count) {
  if (count <= kMostCounters && hold_workspace()) return reinterpret_cast<i32*>(workspace_);
  const i64 bytes = count * static_cast<i64>(sizeof(i32));
  void* const own = allocate(bytes);
  clear(own, bytes);
  return static_cast<i32*>(own);
}

void* Call::mask_parameters() {
  if (mask_bytes_.empty()) mask_bytes_ = mask_.parameters(allocate(mask_.stored_bytes()));
  return mask_bytes_.data();
}

Source source_of(const KernelText& text, const DeviceMask& mask, bool cut) {
  Source source;
  source.name = text.key + (cut ? ", cut, for " : " for ") + mask.type();
  if (text.quick) source.options = {"--ptxas-options=-O1"};
  source.effort = text.effort;
  source.text = std::string("#define JALI_CUT ") + (cut ? "true" : "false") + "\n" +
                mask.definitions() + "namespace jali {\nusing M = " + mask.type() +
                ";\nstatic_assert(sizeof(M) == " + std::to_string(mask.num_bytes()) + ");\n}\n" +
                text.body();
  return source;
}

i32 num_tiles(const AttentionProblem& p, bool rows, i32 size) {
  const i32 length = rows ? p.Lq : p.Lk;
  if (p.varlen) return static_cast<i32>(num_slots(rows ? p.Tq : p.Tk, p.B, size));
  if (p.documents) return static_cast<i32>(num_slots(length, p.documents->length - 1, size));
  return ceil_div(length, size);
}

KernelText map_text(i32 rows, i32 keys, bool key_lines) {
  auto instance = [=] {
    return "M, " + std::to_string(rows) + ", " + std::to_string(keys) + ", " +
           (key_lines ? "true" : "false");
  };
  return {"map_tiles " + instance(), [instance] {
            return R"(
#include "cuda/tile/map_tiles.h"
namespace jali::cuda {
extern "C" __global__ void __launch_bounds__(kMapThreads, 4)
    map(const __grid_constant__ M mask, const __grid_constant__ Sequences s,
        const __grid_constant__ TileMap map, i32 lines, i32 num_heads, i32 together, bool by_tiles,
        bool all, i32 storing, i32* counter) {
  map_tiles<)" + instance() +
                   R"(>(mask, s, map, lines, num_heads, together, by_tiles, all, storing, counter);
}
}  // namespace jali::cuda
)";
          }};
}

TileMap Call::tile_map(i32 rows, i32 keys, bool key_lines, bool by_tiles) {
  const AttentionProblem& p = problem_;
  const BoundMask& mask = *p.mask;
  const i32 line = key_lines ? keys : rows, across = key_lines ? rows : keys;
  const i64 lines = num_tiles(p, !key_lines, line);
  const i32 heads = mask.num_mask_heads();
  TileMap map;
  map.words = ceil_div(key_lines ? p.Lq : p.Lk, 32 * across);
  map.head_div = p.Hq / heads;
  if (heads > 1) map.stride_h = lines;
  const bool varies = !p.varlen && p.B > 1 && (mask.varies_by_batch() || sequences_.cu_step > 0);
  if (varies) map.stride_b = lines * heads;
  const i64 all_lines = lines * heads * (varies ? p.B : 1), words = all_lines * map.words;
  const bool one_for_all = heads == 1 && !varies;
  const bool lists = one_for_all && lines <= kMostLinesToSearch && words <= kMostWordsToSearch;
  const i64 list_bytes = lists ? 4 * (1 + kMostLongLines + lines) : 0;
  map.data = static_cast<u64*>(allocate(words * 8 + list_bytes));
  if (lists) {
    map.long_lines = reinterpret_cast<i32*>(map.data + words);
    map.by_length = map.long_lines + 1 + kMostLongLines;
  }
  // The call's first map comes with the mask's stored blocks: a warp for each, if so many run at once.
  const i64 to_store = ceil_div<i64>(stored_ ? 0 : mask_.num_stored_blocks(), kMapThreads / 32);
  const i32 storing = static_cast<i32>(min_of<i64>(to_store, 4 * device().num_sms));
  stored_ = true;
  i32* const counter = lists || storing ? counters(2) : nullptr;
  const Kernel& build = kernel(map_text(rows, keys, key_lines), "map", 0);
  // A unit (map_tiles.h) is a block's where cells are asked, else a warp's; as few words as keep the GPU
  // busy.
  bool unsure = false;
  for (const auto& leaf : mask.leaves()) unsure |= leaf->device_unsure();
  const i64 units_of_block = unsure ? 1 : kMapThreads / 32, most = 16 * device().num_sms;
  const i32 together = static_cast<i32>(clamp_to<i64>(words / (most * units_of_block), 1, 32));
  const i64 units = all_lines * ceil_div(map.words, together);
  const i64 blocks = storing + clamp_to<i64>(ceil_div<i64>(units, units_of_block), 1, most);
  const i32 num_lines = static_cast<i32>(lines);
  const bool all = p.forced_source == TileSource::kDense;
  launch(build, blocks, kMapThreads, 0,
         {mask_parameters(), &sequences_, &map, &num_lines, &heads, &together, &by_tiles, &all,
          &storing, &counter});
  return map;
}

std::vector<Source> sources_of(const std::vector<KernelText>& texts, const DeviceMask& mask,
                               bool cut) {
  std::vector<Source> sources;
  for (const KernelText& text : texts) sources.push_back(source_of(text, mask, cut));
  return sources;
}

const Kernel& Call::kernel(const KernelText& text, const char* name, int shared_bytes,
                           const std::function<std::vector<KernelText>()>& all) const {
  const auto make_sources = [&] {
    if (!all) return std::vector<Source>{source_of(text, mask_, problem_.cut())};
    std::vector<KernelText> texts = all();
    if (expected_) {
      for (KernelText& later : expected_()) texts.push_back(std::move(later));
    }
    return sources_of(texts, mask_, problem_.cut());
  };
  std::string key;
  key.reserve(512);
  key.append(text.key).append(1, problem_.cut() ? '\1' : '\0').append(mask_.type());
  return find_kernel(std::move(key), name, problem_.device_index, shared_bytes, make_sources);
}

void Call::launch(const Kernel& kernel, i64 blocks, int threads, int shared_bytes,
                  std::initializer_list<const void*> parameters) const {
  constexpr std::size_t kMost = 16;
  void* raw[kMost];
  std::size_t count = 0;
  for (const void* p : parameters) raw[count++] = const_cast<void*>(p);
  // PERF: a kernel's launch, and what it does before it waits, come beside the end of the one before: forwards of 8K,
  // 12 causal documents 190 to 187 us, a window 248 to 245; backwards take as long.
  const LaunchAttribute waits_itself{kWaitsItself, 0, 1};
  const LaunchConfig config{{static_cast<unsigned>(blocks), 1, 1},
                            {static_cast<unsigned>(threads), 1, 1},
                            static_cast<unsigned>(shared_bytes),
                            static_cast<Stream*>(problem_.stream),
                            &waits_itself,
                            1};
  driver_.check(driver_.launch(&config, kernel.function, raw, nullptr), "launching a kernel");
}

Call::RowStrides Call::row_strides(const char* name, const HeadView& view, i64 tokens) const {
  auto bytes = [](i64 stride, i64 count) {
    return count > 1 ? 2 * static_cast<u64>(stride) : kAnyStride;
  };
  const RowStrides of = {bytes(view.stride_l, tokens),
                         bytes(view.stride_h, problem_.Hq / view.head_div),
                         bytes(view.stride_b, problem_.varlen ? 1 : problem_.B)};
  if ((reinterpret_cast<u64>(view.data) | of.token | of.head | of.batch) % 16 != 0) {
    value_error(name,
                ": its address and the strides of its tokens, heads and batch must be "
                "multiples of 16 bytes; pass a contiguous copy with a head dim that is a multiple "
                "of 8");
  }
  return of;
}

TensorMap Call::tensor_map(const char* name, const HeadView& view, i32 width, i64 tokens,
                           i32 rows) const {
  // PERF: 256 bytes at a time take 1.15 of the time where rows do not begin at multiples of 32 (D72, forward).
  constexpr int kBF16 = 9, kF16 = 6, kSwizzle128 = 3, kL2Promotion128 = 2;
  const RowStrides of = row_strides(name, view, tokens);
  auto count = [](i64 number) { return static_cast<u64>(max_of<i64>(number, 1)); };
  u64 dims[5] = {count(width), count(tokens), count(problem_.Hq / view.head_div), count(problem_.B),
                 1};
  u64 strides[4] = {of.token, of.head, of.batch, kAnyStride};
  if (problem_.varlen) {
    // 2^30 (2^35 - token) + (start + length) token + (2^30 - length + n) token = (start + n) token.
    static_assert(kPackedEnd == 1 << 30);
    dims[1] = kPackedEnd;
    dims[3] = count(tokens + 1);
    dims[4] = kPackedEnd + 1;
    strides[2] = of.token;
    strides[3] = (u64{1} << 35) - of.token;
  }
  // Tensors without elements have no address, but an encoding needs one; nothing is copied from it.
  void* const data = view.data ? view.data : reinterpret_cast<void*>(kAlignment);
  const u32 box[5] = {64, static_cast<u32>(rows), 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  TensorMap map;
  driver_.check(driver_.tensor_map(&map, view.dtype == DType::kBF16 ? kBF16 : kF16, 5, data,
                                   reinterpret_cast<const std::uint64_t*>(dims),
                                   reinterpret_cast<const std::uint64_t*>(strides), box, steps, 0,
                                   kSwizzle128, kL2Promotion128, 0),
                name);
  return map;
}

}  // namespace jali::cuda
