#include "cli/load_client.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "core/check.h"

namespace replayssm::cli {
namespace {

using Clock = std::chrono::steady_clock;

// A connection that is closed when it goes.
class Socket {
 public:
  explicit Socket(const LoadTarget& target) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    if (fd_ < 0) fail("socket: ", std::strerror(errno));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(target.port);
    if (inet_pton(AF_INET, target.host.c_str(), &address.sin_addr) != 1) {
      fail("--host: expected an IPv4 address, got '", target.host, "'");
    }
    if (connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      fail("no server at ", target.host, ":", target.port, ": ", std::strerror(errno));
    }
    const int on = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int fd() const { return fd_; }
  void send_all(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t count = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) fail("sending a request: ", std::strerror(errno));
      bytes.remove_prefix(static_cast<size_t>(count));
    }
  }
  // What there is, appended; false at the end.
  bool receive(std::string& bytes) const {
    char piece[1 << 16];
    const ssize_t count = recv(fd_, piece, sizeof piece, 0);
    if (count > 0) bytes.append(piece, static_cast<size_t>(count));
    return count > 0 || (count < 0 && errno == EINTR);
  }

 private:
  int fd_;
};

std::string request_text(const LoadTarget& target, const std::string& path,
                         const std::string& body) {
  std::string text =
      (body.empty() ? "GET " : "POST ") + path + " HTTP/1.1\r\nHost: " + target.host + "\r\n";
  if (!target.api_key.empty()) text += "Authorization: Bearer " + target.api_key + "\r\n";
  if (!body.empty()) {
    text +=
        "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) + "\r\n";
  }
  return text + "\r\n" + body;
}

// An answer as it arrives.
class AnswerReader {
 public:
  std::string bytes;

  // Whether all of it is there.
  bool whole() {
    if (body_ == 0) {
      const size_t end = bytes.find("\r\n\r\n");
      if (end == std::string::npos) return false;
      body_ = end + 4;
      const std::string_view head(bytes.data(), end);
      chunked_ = head.find("Transfer-Encoding: chunked") != std::string_view::npos;
      ok_ = head.starts_with("HTTP/1.1 200");
      const size_t length = head.find("Content-Length: ");
      if (length != std::string_view::npos) {
        std::from_chars(head.data() + length + 16, head.data() + head.size(), length_);
      }
    }
    if (chunked_) return std::string_view(bytes).ends_with("\r\n0\r\n\r\n");
    return bytes.size() >= body_ + length_;
  }
  bool ok() const { return ok_; }
  // Of an answer that is no stream.
  std::string_view body() const { return std::string_view(bytes).substr(body_); }

  // Events of tokens that arrived since the last call; those that end a choice bring none. What
  // was looked through of a stream is let go.
  int64_t new_tokens() {
    constexpr std::string_view kToken = R"(finish_reason":null)";
    int64_t count = 0;
    for (size_t at = bytes.find(kToken, searched_); at != std::string::npos;
         at = bytes.find(kToken, searched_)) {
      ++count;
      searched_ = at + kToken.size();
    }
    if (ok_ && chunked_ && count > 0) bytes.erase(0, std::exchange(searched_, 0));
    return count;
  }

 private:
  size_t body_ = 0, length_ = 0, searched_ = 0;
  bool chunked_ = false, ok_ = false;
};

int64_t number_behind(std::string_view text, std::string_view name) {
  const size_t at = text.rfind(name);
  int64_t value = 0;
  if (at == std::string_view::npos) return 0;
  std::from_chars(text.data() + at + name.size(), text.data() + text.size(), value);
  return value;
}

// One request under way.
struct Active {
  LoadRequest* request;
  Socket socket;
  AnswerReader reader;
};

class Load {
 public:
  Load(const LoadTarget& target, std::vector<LoadRequest>& requests, int64_t concurrency)
      : target_(target), requests_(requests), concurrency_(concurrency) {}

  double run() {
    while (next_ < requests_.size() || !active_.empty()) {
      send_due();
      wait();
    }
    return now();
  }

 private:
  double now() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  void send_due() {
    while (next_ < requests_.size() && std::ssize(active_) < concurrency_ &&
           requests_[next_].due <= now()) {
      LoadRequest& request = requests_[next_++];
      std::optional<Socket> socket;
      if (idle_.empty()) {
        socket.emplace(target_);
      } else {
        socket = std::move(idle_.back());
        idle_.pop_back();
      }
      request.sent = now();
      socket->send_all(request_text(target_, "/v1/completions", request.body));
      active_.push_back({&request, *std::move(socket), {}});
    }
  }

  void wait() {
    std::vector<pollfd> polled;
    polled.reserve(active_.size());
    for (const Active& active : active_) polled.push_back({active.socket.fd(), POLLIN, 0});
    int timeout = -1;
    if (next_ < requests_.size() && std::ssize(active_) < concurrency_) {
      timeout = static_cast<int>(std::max(0.0, requests_[next_].due - now()) * 1e3) + 1;
    }
    poll(polled.data(), polled.size(), timeout);
    for (size_t i = polled.size(); i-- > 0;) {
      if (polled[i].revents != 0) receive(i);
    }
  }

  void receive(size_t index) {
    Active& active = active_[index];
    const bool open = active.socket.receive(active.reader.bytes);
    LoadRequest& request = *active.request;
    const double time = now();
    const bool whole = active.reader.whole();
    for (int64_t i = active.reader.new_tokens(); i > 0; --i) request.token_times.push_back(time);
    if (!whole && open) return;
    request.last = time;
    request.output_tokens = number_behind(active.reader.bytes, "\"completion_tokens\":");
    request.cached_tokens = number_behind(active.reader.bytes, "\"cached_tokens\":");
    request.first = request.token_times.empty() ? time : request.token_times.front();
    if (!whole) request.error = "the connection ended";
    if (whole && !active.reader.ok()) request.error = std::string(active.reader.body());
    if (whole) idle_.push_back(std::move(active.socket));
    active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  const LoadTarget& target_;
  std::vector<LoadRequest>& requests_;
  int64_t concurrency_;
  size_t next_ = 0;
  std::vector<Active> active_;
  std::vector<Socket> idle_;
  Clock::time_point start_ = Clock::now();
};

}  // namespace

std::string fetch(const LoadTarget& target, const std::string& path) {
  const Socket socket(target);
  socket.send_all(request_text(target, path, ""));
  AnswerReader reader;
  while (!reader.whole()) {
    if (!socket.receive(reader.bytes)) fail(path, ": the server closed the connection");
  }
  if (!reader.ok()) fail(path, ": ", reader.body());
  return std::string(reader.body());
}

double run_load(const LoadTarget& target, std::vector<LoadRequest>& requests, int64_t concurrency) {
  return Load(target, requests, concurrency).run();
}

}  // namespace replayssm::cli
