// Compiled kernels on disk, shared by all processes of a user.
//
// An entry is one file, <key>.cubin: a line that names the format and the checksum, then the bytes.
// It is written to a temporary file, synced and renamed, so a reader sees all of it or none; a
// process killed in between leaves a temporary file that a later clean-up removes. While one
// process compiles, it holds a lock on <key>.lock; the others wait and then read its result. A
// folder that cannot be read or written is no error: the kernel is compiled for this process alone.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace jali::cuda {

class DiskCache {
 public:
  /// `limit_bytes`: when an entry is added and the total is beyond it, the entries that were not
  /// used for longest go. An empty folder turns the cache off.
  DiskCache(std::string folder, std::int64_t limit_bytes);
  /// JALI_CACHE, else $XDG_CACHE_HOME/jali, else ~/.cache/jali; empty when there is no home.
  static std::string root();
  /// The cache of one compiler version, a folder below root(); JALI_CACHE_LIMIT in MB bounds it.
  static DiskCache of_compiler(const std::string& version);
  /// Those of every compiler version that has one below a root.
  static std::vector<DiskCache> all(const std::string& root);

  const std::string& folder() const { return folder_; }
  /// The entry, or nothing where it is absent or damaged.
  std::optional<std::string> find(const std::string& key) const;
  /// The entry; where it is absent, make() is called by one process only, and kept.
  std::string find_or_make(const std::string& key, const std::function<std::string()>& make) const;
  /// Entries and their bytes.
  std::pair<int, std::int64_t> usage() const;
  /// What the last failure to write was, or empty.
  static std::string last_problem();

 private:
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  bool store(const std::string& key, const std::string& bytes) const;
  void evict() const;
  std::string folder_;
  std::int64_t limit_bytes_;
};

}  // namespace jali::cuda
