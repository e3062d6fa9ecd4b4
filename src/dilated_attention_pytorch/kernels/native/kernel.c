/* Both passes for one instruction set, which the compiler is told of; NAME is what dispatch.c knows them by. */
#include "backward.h"
#include "forward.h"

const kernel NAME = {forward_scratch, backward_scratch, forward, join, backward, ROWS, FEW};
