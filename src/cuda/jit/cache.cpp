#include "cuda/jit/cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <mutex>
#include <vector>

#include "base/env.h"
#include "base/error.h"
#include "cuda/jit/sha256.h"

namespace jali::cuda {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "jali-cubin-2 ";
constexpr auto kStale = std::chrono::hours(1);  // a temporary file this old has lost its writer

std::mutex problem_mutex;
std::string problem;
void note_problem(const std::string& what) {
  const std::lock_guard<std::mutex> lock(problem_mutex);
  problem = what;
}

/// An advisory lock on a file while it lives; none where the file cannot be made.
class FileLock {
 public:
  explicit FileLock(const std::string& path) {
    file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file_ < 0) return;
    while (flock(file_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~FileLock() {
    if (file_ < 0) return;
    flock(file_, LOCK_UN);  // a process forked meanwhile has the file open, too
    close(file_);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int file_ = -1;
};

bool write_all(int file, const std::string& bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t n = write(file, bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<std::size_t>(n);
  }
  return fsync(file) == 0;
}

std::int64_t limit_bytes() {
  const std::string text = env("JALI_CACHE_LIMIT");
  std::int64_t megabytes = 512;
  if (!text.empty()) {
    const char* const end = text.data() + text.size();
    const auto read = std::from_chars(text.data(), end, megabytes);
    if (read.ec != std::errc() || read.ptr != end || megabytes < 1 || megabytes >> 40) {
      value_error("JALI_CACHE_LIMIT=", text, ": expected a whole number of MB, at least 1");
    }
  }
  return megabytes << 20;
}

}  // namespace

DiskCache::DiskCache(std::string folder, std::int64_t limit_bytes)
    : folder_(std::move(folder)), limit_bytes_(limit_bytes) {
  if (folder_.empty()) return;
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) note_problem("cannot make " + folder_ + ": " + error.message());
}

std::string DiskCache::root() {
  const std::string named = env("JALI_CACHE");
  if (!named.empty()) return named;
  const char* xdg = std::getenv("XDG_CACHE_HOME");
  if (xdg && *xdg) return std::string(xdg) + "/jali";
  const char* home = std::getenv("HOME");
  return home && *home ? std::string(home) + "/.cache/jali" : "";
}

DiskCache DiskCache::of_compiler(const std::string& version) {
  return DiskCache(root().empty() ? "" : root() + "/" + version, limit_bytes());
}

std::vector<DiskCache> DiskCache::all(const std::string& root) {
  std::vector<DiskCache> caches;
  std::error_code error;
  for (const auto& folder : fs::directory_iterator(root, error)) {
    if (folder.is_directory(error)) caches.emplace_back(folder.path().string(), limit_bytes());
  }
  return caches;
}

std::string DiskCache::last_problem() {
  const std::lock_guard<std::mutex> lock(problem_mutex);
  return problem;
}

std::optional<std::string> DiskCache::find(const std::string& key) const {
  if (folder_.empty()) return std::nullopt;
  const std::string file = path(key + ".cubin");
  std::ifstream in(file, std::ios::binary);
  if (!in) return std::nullopt;
  const std::string all((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const std::size_t format = std::strlen(kFormat), header = format + 64 + 1;
  const bool whole = all.size() > header && all.compare(0, format, kFormat) == 0 &&
                     all[header - 1] == '\n' &&
                     all.compare(format, 64, sha256(std::string_view(all).substr(header))) == 0;
  if (!whole) {  // damaged: whoever holds the lock writes it anew
    note_problem(file + " was damaged");
    return std::nullopt;
  }
  utimensat(AT_FDCWD, file.c_str(), nullptr, 0);  // used now; may fail in a read-only folder
  return all.substr(header);
}

std::string DiskCache::find_or_make(const std::string& key,
                                    const std::function<std::string()>& make) const {
  if (std::optional<std::string> entry = find(key)) return *entry;
  if (folder_.empty()) return make();
  const FileLock lock(path(key + ".lock"));
  // Another process may have made it while this one waited.
  if (std::optional<std::string> entry = find(key)) return *entry;
  std::string bytes = make();
  if (store(key, bytes)) evict();
  return bytes;
}

bool DiskCache::store(const std::string& key, const std::string& bytes) const {
  std::string temporary = path(key + ".XXXXXX");
  const int file = mkostemp(temporary.data(), O_CLOEXEC);
  if (file < 0) {
    note_problem("cannot write to " + folder_ + ": " + std::strerror(errno));
    return false;
  }
  fchmod(file, 0644);
  bool written = write_all(file, kFormat + sha256(bytes) + "\n") && write_all(file, bytes);
  int error = errno;
  if (close(file) != 0 && written) {  // some file systems say here that there was no room
    written = false;
    error = errno;
  }
  if (written) {
    if (rename(temporary.c_str(), path(key + ".cubin").c_str()) == 0) return true;
    error = errno;
  }
  note_problem("cannot write " + path(key + ".cubin") + ": " + std::strerror(error));
  unlink(temporary.c_str());
  return false;
}

std::pair<int, std::int64_t> DiskCache::usage() const {
  std::pair<int, std::int64_t> total{0, 0};
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_, error)) {
    if (entry.path().extension() != ".cubin") continue;
    ++total.first;
    total.second += static_cast<std::int64_t>(entry.file_size(error));
  }
  return total;
}

void DiskCache::evict() const {
  struct Entry {
    fs::path path;
    fs::file_time_type used;
    std::int64_t bytes;
  };
  std::vector<Entry> entries;
  std::int64_t total = 0;
  std::error_code error;
  for (const auto& found : fs::directory_iterator(folder_, error)) {
    const fs::file_time_type used = found.last_write_time(error);
    if (error) continue;
    if (found.path().extension() == ".cubin") {
      const auto bytes = static_cast<std::int64_t>(found.file_size(error));
      if (error) continue;
      entries.push_back({found.path(), used, bytes});
      total += bytes;
    } else if (found.path().extension() != ".lock" &&
               fs::file_time_type::clock::now() - used > kStale) {
      fs::remove(found.path(), error);
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.used < b.used; });
  for (const Entry& oldest : entries) {
    if (total <= limit_bytes_) break;
    if (fs::remove(oldest.path, error)) total -= oldest.bytes;
  }
}

}  // namespace jali::cuda
