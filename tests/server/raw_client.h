// Blocking HTTP over one connection.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

namespace replayssm::testing {

class RawClient {
 public:
  explicit RawClient(uint16_t port) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    const timeval patience{.tv_sec = 60, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  }
  ~RawClient() { close(fd_); }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  bool connected() const { return connected_; }
  void post(const std::string& path, const std::string& body) const {
    send_all("POST " + path + " HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: " +
             std::to_string(body.size()) + "\r\n\r\n" + body);
  }
  void get(const std::string& path) const { send_all("GET " + path + " HTTP/1.1\r\n\r\n"); }

  // The body of the next answer, chunked or not, as sent; empty where the connection ends.
  std::string read() {
    size_t head = 0;
    while ((head = data_.find("\r\n\r\n")) == std::string::npos) {
      if (!more()) return {};
    }
    const bool chunked = data_.find("Transfer-Encoding: chunked") < head;
    const size_t length_at = data_.find("Content-Length: ");
    const size_t length =
        length_at < head ? std::strtoul(data_.c_str() + length_at + 16, nullptr, 10) : 0;
    const size_t begin = head + 4;
    while (chunked ? data_.find("\r\n0\r\n\r\n", head) == std::string::npos
                   : data_.size() < begin + length) {
      if (!more()) return {};
    }
    const size_t end = chunked ? data_.find("\r\n0\r\n\r\n", head) + 7 : begin + length;
    std::string body = data_.substr(begin, end - begin);
    data_.erase(0, end);
    return body;
  }
  void send_all(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t count = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count <= 0) return;
      bytes.remove_prefix(static_cast<size_t>(count));
    }
  }

  // Some bytes of an answer, whatever they are.
  bool more() {
    char piece[4096];
    const ssize_t count = recv(fd_, piece, sizeof piece, 0);
    if (count > 0) data_.append(piece, static_cast<size_t>(count));
    return count > 0;
  }

 private:
  int fd_;
  bool connected_ = false;
  std::string data_;
};

}  // namespace replayssm::testing
