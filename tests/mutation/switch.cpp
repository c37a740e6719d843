// Which mutant of the device sources is active, and which ones a test reached.
namespace {
constexpr unsigned kSlots = 1 << 14;
int active = 0;
int reached[kSlots];  // open addressing; 0 is free
}  // namespace

extern "C" {

int rtk_mutant(int number) {
    unsigned slot = static_cast<unsigned>(number) * 2654435761u >> 18;
    while (reached[slot] != number && reached[slot] != 0) slot = (slot + 1) % kSlots;
    reached[slot] = number;
    return number == active;
}

void rtk_mutant_choose(int number) {
    active = number;
    for (unsigned i = 0; i < kSlots; ++i) reached[i] = 0;
}

unsigned rtk_mutant_reached(int* to) {
    unsigned count = 0;
    for (unsigned i = 0; i < kSlots; ++i)
        if (reached[i] != 0) to[count++] = reached[i];
    return count;
}
}
