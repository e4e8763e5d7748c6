#include "listener.h"

#include <dirent.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <list>
#include <mutex>

#include "admission.h"
#include "clock.h"
#include "engine.h"
#include "socket.h"

namespace ldr {
namespace {

constexpr size_t kMaxUnixPathBytes = 100;                 // sun_path has 108, with the NUL
constexpr int kAcceptsPerWake = 64;
constexpr int64_t kAcceptPauseNs = 100 * kMillisecond;    // no descriptors left: look again later instead of spinning
constexpr time_t kAbandonedAfterS = 60;

// Makes the directory, mode 0700; a directory of somebody else is refused, whatever its mode.
Status own_directory(const std::string &path) {
  if (mkdir(path.c_str(), 0700) < 0 && errno != EEXIST) return fail_errno(LDR_ERR_BIND, "mkdir %s", path.c_str());
  struct stat info;
  if (lstat(path.c_str(), &info) < 0) return fail_errno(LDR_ERR_BIND, "lstat %s", path.c_str());
  if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid())
    return fail(LDR_ERR_BIND, "%s is no directory of this user (uid %d): remove it or set XDG_RUNTIME_DIR", path.c_str(), int(geteuid()));
  if ((info.st_mode & 0777) != 0700 && chmod(path.c_str(), 0700) < 0) return fail_errno(LDR_ERR_BIND, "chmod 0700 of %s", path.c_str());
  return Status::success();
}

Status socket_directory(std::string *path_p) {
  const char *runtime = getenv("XDG_RUNTIME_DIR");
  if (runtime && *runtime == '/' && std::string(runtime).size() < kMaxUnixPathBytes - 50) {
    *path_p = std::string(runtime) + "/llm_datadist_ray";
    if (own_directory(*path_p).ok()) return Status::success();  // else it is not there or not ours, as under sudo
  }
  *path_p = "/tmp/llm_datadist_ray-" + std::to_string(geteuid());
  return own_directory(*path_p);
}

bool ends_with(const std::string &text, const std::string &end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Sockets of engines that were killed: nobody listens, so a connect is refused. One that is being made has another name until it listens.
void remove_dead_sockets(const std::string &directory) {
  DIR *entries = opendir(directory.c_str());
  if (!entries) return;
  while (dirent *entry = readdir(entries)) {
    std::string path = directory + "/" + entry->d_name;
    struct stat info;
    Fd probe;
    if (ends_with(path, ".sock")) {
      if (!connect_unix(path, &probe).ok() && errno == ECONNREFUSED) unlink(path.c_str());
    } else if (ends_with(path, ".new") && lstat(path.c_str(), &info) == 0 && info.st_mtime + kAbandonedAfterS < time(nullptr)) {
      unlink(path.c_str());
    }
  }
  closedir(entries);
}

}  // namespace

// A TCP listener is there as long as listen() or listen_also() want it.
struct TcpPlace {
  std::string ip;
  uint32_t port = 0;
  Fd socket;
  bool is_main = false;     // listen()'s
  uint32_t num_shares = 0;  // listen_also()'s
};
using TcpPlaces = std::list<TcpPlace>;

struct Listener::Impl {
  explicit Impl(Engine &engine) : engine(engine) {}

  Engine &engine;
  std::mutex mutex;  // one change at a time
  std::string unix_path;
  std::unique_ptr<Admission> admission;
  Fd unix_socket;
  TcpPlaces places;
  std::atomic<uint32_t> port{0};  // the main one's

  Status watch(int fd, bool is_unix) {
    return engine.loop.watch(fd, EPOLLIN, [this, fd, is_unix](uint32_t) { accept_some(fd, is_unix); });
  }

  void accept_some(int fd, bool is_unix) {
    for (int i = 0; i < kAcceptsPerWake; ++i) {
      Fd socket = accept_connection(fd);
      if (socket) {
        if (!is_unix) mark(socket.get(), engine.config.marks);
        admission->take(std::move(socket), is_unix);
        continue;
      }
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        engine.loop.unwatch(fd);
        engine.loop.at(now_ns() + kAcceptPauseNs, [this, fd, is_unix] {
          if (is_open(fd)) (void)watch(fd, is_unix);
        });
      }
      return;
    }
  }

  bool is_open(int fd) const {
    return fd == unix_socket.get() || std::any_of(places.begin(), places.end(), [fd](const TcpPlace &place) { return place.socket.get() == fd; });
  }

  // Descriptors and places come and go on the loop thread, which looks at them too. Nothing happens once the loop has ended.
  Status start_unix(Fd socket) {
    Status status = closing();
    engine.loop.run([&] {
      unix_socket = std::move(socket);
      status = watch(unix_socket.get(), true);
    });
    return status;
  }

  void end_unix() {
    engine.loop.run([&] {
      engine.loop.unwatch(unix_socket.get());
      unix_socket.reset();
    });
  }

  Status open(const std::string &ip, uint32_t asked_port, TcpPlaces::iterator *place_p) {
    TcpPlaces fresh(1);
    TcpPlace &place = fresh.front();
    place.ip = ip;
    if (Status status = listen_tcp(ip, asked_port, engine.config.marks, &place.socket, &place.port); !status.ok()) return status;
    Status status = closing();
    engine.loop.run([&] {
      status = watch(place.socket.get(), false);
      if (status.ok()) places.splice(places.end(), fresh);
    });
    if (status.ok()) *place_p = std::prev(places.end());
    return status;
  }

  void close_unwanted() {
    engine.loop.run([&] {
      for (auto at = places.begin(); at != places.end();) {
        bool is_wanted = at->is_main || at->num_shares;
        if (!is_wanted) engine.loop.unwatch(at->socket.get());
        at = is_wanted ? std::next(at) : places.erase(at);
      }
    });
  }

  TcpPlaces::iterator find(const std::string &ip, uint32_t at_port) {
    return std::find_if(places.begin(), places.end(), [&](const TcpPlace &place) { return place.port == at_port && covers(place.ip, ip); });
  }

  void leave_main() {
    for (TcpPlace &place : places) place.is_main = false;
    port = 0;
    close_unwanted();
  }

  static Status closing() { return fail(LDR_ERR_CLOSED, "the engine is being destroyed"); }
};

Listener::Listener(Engine &engine) : impl_(new Impl(engine)) {}

Listener::~Listener() = default;

Status Listener::start_unix() {
  std::lock_guard lock(impl_->mutex);
  std::string directory;
  if (Status status = socket_directory(&directory); !status.ok()) return status;
  remove_dead_sockets(directory);
  char name[32];
  snprintf(name, sizeof(name), "/%016llx", (unsigned long long)impl_->engine.incarnation);
  std::string path = directory + name + ".sock", unfinished = directory + name + ".new";
  Fd socket;
  if (Status status = listen_unix(unfinished, &socket); !status.ok()) return status;
  if (rename(unfinished.c_str(), path.c_str()) < 0) {
    Status status = fail_errno(LDR_ERR_BIND, "rename to %s", path.c_str());
    unlink(unfinished.c_str());
    return status;
  }
  impl_->unix_path = path;
  impl_->admission = std::make_unique<Admission>(impl_->engine, path);
  return impl_->start_unix(std::move(socket));
}

Status Listener::listen(const std::string &ip, uint32_t port) {
  std::lock_guard lock(impl_->mutex);
  if (Status status = check_address(ip, port); !status.ok()) return status;
  if (port != 0 && port == impl_->port) return Status::success();
  impl_->leave_main();
  auto place = impl_->find(ip, port);
  if (place == impl_->places.end()) {
    if (Status status = impl_->open(ip, port, &place); !status.ok()) return status;
  }
  place->is_main = true;
  impl_->port = place->port;
  return Status::success();
}

void Listener::unlisten() {
  std::lock_guard lock(impl_->mutex);
  impl_->leave_main();
}

Status Listener::listen_also(const std::string &ip, uint32_t port) {
  std::lock_guard lock(impl_->mutex);
  if (Status status = check_address(ip, port); !status.ok()) return status;
  if (port == 0) return fail(LDR_ERR_INVALID, "one more listener on %s needs a port", ip.c_str());
  auto place = impl_->find(ip, port);
  if (place == impl_->places.end()) {
    if (Status status = impl_->open(ip, port, &place); !status.ok()) return status;
  }
  ++place->num_shares;
  return Status::success();
}

Status Listener::give_up(const std::string &ip, uint32_t port) {
  std::lock_guard lock(impl_->mutex);
  auto place = impl_->find(ip, port);
  if (place == impl_->places.end() || place->num_shares == 0)
    return fail(LDR_ERR_NOT_FOUND, "nobody asked to listen on %s, or gave it up already", address_text(ip, port).c_str());
  --place->num_shares;
  impl_->close_unwanted();
  return Status::success();
}

void Listener::stop() {
  std::lock_guard lock(impl_->mutex);
  for (TcpPlace &place : impl_->places) place.num_shares = 0;
  impl_->leave_main();
  impl_->end_unix();
  if (!impl_->unix_path.empty()) unlink(impl_->unix_path.c_str());
  impl_->engine.loop.run([this] {
    if (impl_->admission) impl_->admission->close();
  });
}

uint32_t Listener::port() const { return impl_->port; }
const std::string &Listener::unix_path() const { return impl_->unix_path; }

}  // namespace ldr
