// The disk cache of compiled kernels: one maker, whole entries, damage and full folders survived.
#include "cuda/jit/cache.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "check.h"
#include "cuda/jit/sha256.h"

using namespace jali::cuda;
namespace fs = std::filesystem;

namespace {

/// An empty folder of its own, removed at the end.
struct Folder {
  std::string path;
  Folder() {
    std::string name = (fs::temp_directory_path() / "jali-cache-XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~Folder() { fs::remove_all(path); }
};

}  // namespace

TEST(sha256_of_the_standards_examples) {
  CHECK(sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

TEST(an_entry_is_made_once_and_found_again) {
  const Folder folder;
  int made = 0;
  for (int n = 0; n < 3; ++n) {
    const DiskCache cache(folder.path, 1 << 20);
    CHECK(cache.find_or_make("key", [&] { return ++made, std::string("bytes\0more", 10); }) ==
          std::string("bytes\0more", 10));
  }
  CHECK_EQ(made, 1);
  CHECK_EQ(DiskCache(folder.path, 1 << 20).usage().first, 1);
}

TEST(processes_that_start_together_make_it_once) {
  const Folder folder;
  constexpr int kProcesses = 16;
  for (int n = 0; n < kProcesses; ++n) {
    if (fork() == 0) {
      const DiskCache cache(folder.path, 1 << 20);
      cache.find_or_make("key", [&] {
        std::ofstream(folder.path + "/made." + std::to_string(getpid())) << "x";
        usleep(100000);
        return std::string(100000, 'k');
      });
      _exit(cache.find("key") == std::string(100000, 'k') ? 0 : 1);
    }
  }
  for (int n = 0; n < kProcesses; ++n) {
    int status = 1;
    wait(&status);
    CHECK_EQ(status, 0);
  }
  int made = 0;
  for (const auto& entry : fs::directory_iterator(folder.path)) {
    made += entry.path().filename().string().starts_with("made.");
  }
  CHECK_EQ(made, 1);
}

TEST(a_damaged_entry_is_made_anew) {
  const Folder folder;
  const DiskCache cache(folder.path, 1 << 20);
  cache.find_or_make("key", [] { return std::string("good"); });
  for (const char* damage : {"", "short", "jali-cubin-2 0000\nbad"}) {
    std::ofstream(folder.path + "/key.cubin", std::ios::trunc) << damage;
    CHECK(!cache.find("key").has_value());
    CHECK(cache.find_or_make("key", [] { return std::string("again"); }) == "again");
    CHECK(cache.find("key") == "again");
  }
}

TEST(a_folder_that_cannot_be_written_is_no_error) {
  const Folder folder;
  std::ofstream(folder.path + "/file") << "x";
  const DiskCache cache(folder.path + "/file/below", 1 << 20);  // no folder can be made there
  CHECK(cache.find_or_make("key", [] { return std::string("made"); }) == "made");
  CHECK(!cache.find("key").has_value());
  CHECK(!DiskCache::last_problem().empty());
  CHECK(DiskCache("", 1 << 20).find_or_make("key", [] { return std::string("off"); }) == "off");
}

/// What `check` says in a process of its own.
template <class Check>
bool in_child(Check check) {
  if (fork() == 0) _exit(check() ? 0 : 1);
  int status = 1;
  wait(&status);
  return status == 0;
}

TEST(a_read_only_folder_gives_what_it_has) {
  const Folder folder;
  const DiskCache cache(folder.path, 1 << 20);
  cache.find_or_make("key", [] { return std::string("old"); });
  chmod(folder.path.c_str(), 0555);
  CHECK(in_child([&] {
    if (geteuid() == 0 && setuid(65534) != 0) return false;  // root may write everywhere
    const auto other = [] { return std::string("new"); };
    return cache.find_or_make("key", other) == "old" &&
           cache.find_or_make("other", other) == "new" && !cache.find("other") &&
           !DiskCache::last_problem().empty();
  }));
  chmod(folder.path.c_str(), 0755);
}

TEST(without_room_nothing_is_left_behind) {
  const Folder folder;
  const DiskCache cache(folder.path, 1 << 20);
  cache.find_or_make("old", [] { return std::string("small"); });
  CHECK(in_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit most{4096, 4096};  // a file that grows further fails as one on a full disk
    if (setrlimit(RLIMIT_FSIZE, &most) != 0) return false;
    const std::string big(100000, 'x');
    return cache.find_or_make("big", [&] { return big; }) == big && !cache.find("big") &&
           cache.find("old") == "small" && !DiskCache::last_problem().empty();
  }));
  for (const auto& entry : fs::directory_iterator(folder.path)) {
    const std::string name = entry.path().filename().string();
    CHECK(name == "old.cubin" || name.ends_with(".lock"));
  }
  CHECK(cache.find_or_make("big", [] { return std::string("there is room"); }) == "there is room");
  CHECK(cache.find("big") == "there is room");
}

TEST(what_was_not_used_for_longest_goes_first) {
  const Folder folder;
  const DiskCache cache(folder.path, 2500);
  for (const char* key : {"a", "b", "c"}) {
    cache.find_or_make(key, [] { return std::string(1000, 'x'); });
    fs::last_write_time(folder.path + "/" + key + ".cubin",
                        fs::file_time_type::clock::now() - std::chrono::hours('z' - key[0]));
  }
  cache.find_or_make("d", [] { return std::string(1000, 'x'); });
  CHECK(!cache.find("a").has_value());
  CHECK(cache.find("d").has_value());
  CHECK(cache.usage().second <= 2500);
}
