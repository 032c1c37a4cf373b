// Connections, without a model behind them.
#include "server/http.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "server/raw_client.h"

namespace replayssm::http {
namespace {

using testing::RawClient;

class HttpTest : public ::testing::Test {
 protected:
  void start(Options options, std::function<void(Request, ExchangePtr)> handle) {
    options.port = 0;
    server_ = std::make_unique<Server>(
        options, Server::Callbacks{.handle = std::move(handle), .refused = [](int status, auto&) {
                                     return Response{.status = status};
                                   }});
    thread_ = std::thread([this] { server_->run(); });
  }
  ~HttpTest() override {
    server_->post([this] { server_->stop(); });
    thread_.join();
  }

  template <class Condition>
  static bool soon(Condition condition) {
    for (int tries = 0; tries < 500; ++tries) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

  std::unique_ptr<Server> server_;
  std::thread thread_;
  std::atomic<int> asked_{0}, aborted_{0};
  std::vector<ExchangePtr> held_;  // the server's thread's
};

constexpr int64_t kUnsent = 64 << 10;

TEST_F(HttpTest, AnswersMayBeLargerThanWhatMayWait) {
  const std::string large(16 << 20, 'x');
  start({.max_unsent = kUnsent},
        [&](const Request&, const ExchangePtr& exchange) { exchange->reply({.body = large}); });
  RawClient client(server_->port());
  for (int i = 0; i < 2; ++i) {
    client.get("/");
    EXPECT_TRUE(client.read() == large);
  }
}

// More than the system's buffers take lies unread: the reader is given up, and nobody else is.
TEST_F(HttpTest, GivesUpWhoReadsTooSlowly) {
  std::function<void(ExchangePtr, int)> go_on = [&](const ExchangePtr& exchange, int left) {
    if (left == 0 || aborted_ > 0) return exchange->end();
    exchange->write(std::string(1 << 20, 'x'));
    server_->post([&, exchange, left] { go_on(exchange, left - 1); });
  };
  start({.max_unsent = kUnsent}, [&](const Request& request, const ExchangePtr& exchange) {
    if (request.path == "/quick") return exchange->reply({.body = "here"});
    exchange->on_abort([&] { ++aborted_; });
    exchange->begin({.content_type = "text/plain"});
    go_on(exchange, 1000);
  });
  RawClient slow(server_->port());
  slow.get("/");
  RawClient quick(server_->port());
  quick.get("/quick");
  EXPECT_EQ(quick.read(), "here");
  EXPECT_TRUE(soon([&] { return aborted_ == 1; }));
  EXPECT_TRUE(soon([&] { return server_->connections() == 1; }));
}

TEST_F(HttpTest, ConnectionsBeyondTheMostWaitForTheirTurn) {
  start({.max_connections = 2}, [](const Request& request, const ExchangePtr& exchange) {
    exchange->reply({.body = request.path});
  });
  auto first = std::make_unique<RawClient>(server_->port());
  RawClient second(server_->port());
  first->get("/first");
  EXPECT_EQ(first->read(), "/first");
  second.get("/second");
  EXPECT_EQ(second.read(), "/second");
  RawClient third(server_->port());
  third.get("/third");
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(server_->connections(), 2);
  first.reset();
  EXPECT_EQ(third.read(), "/third");
}

// Whoever goes away is noticed, though further requests of theirs lie unread.
TEST_F(HttpTest, NoticesWhoGoesAwayWithRequestsInFlight) {
  start({}, [&](const Request& request, const ExchangePtr& exchange) {
    ++asked_;
    if (request.path == "/now") return exchange->reply({.body = "now"});
    exchange->on_abort([&] { ++aborted_; });
    held_.push_back(exchange);
  });
  for (const bool at_once : {true, false}) {
    const int before = asked_, gone = aborted_;
    {
      RawClient client(server_->port());
      client.send_all("GET /now HTTP/1.1\r\n\r\nGET /held HTTP/1.1\r\n\r\n" +
                      std::string(at_once ? "GET /now HTTP/1.1\r\n\r\n" : ""));
      EXPECT_EQ(client.read(), "now");
      EXPECT_TRUE(soon([&] { return asked_ == before + 2; }));
      if (!at_once) client.get("/now");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    EXPECT_TRUE(soon([&] { return aborted_ == gone + 1; }));
    EXPECT_EQ(asked_, before + 2);
  }
  EXPECT_TRUE(soon([&] { return server_->connections() == 0; }));
}

TEST_F(HttpTest, AnswersRequestsThatCameMeanwhile) {
  start({}, [&](const Request& request, const ExchangePtr& exchange) {
    server_->after(0.05, [=] { exchange->reply({.body = request.path}); });
  });
  RawClient client(server_->port());
  client.get("/0");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  for (int i = 1; i < 5; ++i) client.get("/" + std::to_string(i));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(client.read(), "/" + std::to_string(i));
}

}  // namespace
}  // namespace replayssm::http
