/* What the card says of itself: an H100. Attributes have one number in the runtime and the driver. */
#pragma once

#define CARD_NAME "NVIDIA H100 80GB HBM3"
#define CARD_BYTES ((size_t)81559 << 20)
#define CARD_VERSION 13000

static int card_attribute(int attribute) {
    switch (attribute) {
    case 1: return 1024;           /* threads of a block */
    case 8: return 48 << 10;       /* shared memory of a block */
    case 10: return 32;            /* threads of a warp */
    case 12: return 64 << 10;      /* registers of a block */
    case 13: return 1980000;       /* clock, kHz */
    case 16: return 132;           /* multiprocessors */
    case 36: return 2619000;       /* memory clock, kHz */
    case 37: return 5120;          /* memory bus, bits */
    case 38: return 50 << 20;      /* L2 cache */
    case 39: return 2048;          /* threads of a multiprocessor */
    case 75: return 9;             /* compute capability 9.0 */
    case 76: return 0;
    case 81: return 228 << 10;     /* shared memory of a multiprocessor */
    case 82: return 64 << 10;      /* registers of a multiprocessor */
    case 97: return 227 << 10;     /* shared memory of a block that asks for it */
    default: return 1;
    }
}
