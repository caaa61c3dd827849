// g++ -std=c++11 -Wall -Wextra -Werror -pthread stages_test.cpp -o /tmp/t && /tmp/t
#include "stages.hpp"

#include <cstdlib>
#include <regex>
#include <stdexcept>
#include <thread>
#include <vector>

static void expect(bool ok, const std::string &what) {
    if (ok) return;
    std::fprintf(stderr, "FAIL: %s\n", what.c_str());
    std::exit(1);
}

int main() {
    stages::Record r;
    {
        stages::Stage s(r, "forward");
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        s.set("batch", 8).set("audio", 2.5).set("a b", 1);
    }
    try {
        stages::Stage s(r, "decode;x");
        throw std::runtime_error("no");
    } catch (const std::runtime_error &) {
    }
    std::smatch m;
    std::string v = r.value();
    expect(std::regex_match(v, m, std::regex("forward;dur=([0-9.]+);batch=8;audio=2.5;a_b=1, decode_x;dur=[0-9.]+, total;dur=([0-9.]+)")), v);
    expect(std::stod(m[1]) >= 20 && std::stod(m[2]) >= std::stod(m[1]), v);
    expect(stages::Record().value().compare(0, 10, "total;dur=") == 0, "an empty record tells its total");
    expect(stages::number(0) == "0" && stages::number(1500) == "1500" && stages::number(0.1234) == "0.123" && stages::number(100) == "100", "numbers");

    stages::Record many;
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; i++)
        threads.emplace_back([&many] {
            for (int k = 0; k < 1000; k++) many.add("decode", 1);
        });
    for (auto &t : threads) t.join();
    expect(many.value().size() < 2000, "a long request keeps its header short");
    std::puts("ok");
}
