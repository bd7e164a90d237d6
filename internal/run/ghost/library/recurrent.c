/* cuDNN's recurrent networks: where parameters lie in the one buffer that holds them, and how much is kept for the backward
 * pass.
 */
#include "ghost.h"

typedef int result;

struct tensor {
	int type, count, sizes[3];
};
/* A descriptor of a network. Cells: 0 and 1 are plain, 2 is LSTM, 3 is GRU. */
struct network {
	int cell, biases, directions, width, input, hidden, projected, layers;
};
/* A descriptor of what goes in. */
struct sequences {
	int steps, batch;
};

static int width(int type) { return type == 1 ? 8 : type == 2 || type == 9 ? 2 : 4; } /* DOUBLE; HALF, BFLOAT16; FLOAT */

EXPORT result cudnnSetRNNDescriptor_v8(struct network *n, int algorithm, int cell, int bias, int direction, int first, int type,
	int precision, int math, int input, int hidden, int projected, int layers, void *dropout, unsigned flags) {
	static const int biases[] = {0, 1, 2, 1}; /* of cudnnRNNBiasMode_t */
	*n = (struct network){cell, biases[bias & 3], 1 + direction, width(type), input, hidden, projected, layers};
	return SUCCESS;
}
EXPORT result cudnnSetRNNDataDescriptor(struct sequences *s, int type, int layout, int steps, int batch) {
	*s = (struct sequences){steps, batch};
	return SUCCESS;
}

static size_t gates(const struct network *n) { return n->cell == 2 ? 4 : n->cell == 3 ? 3 : 1; }
static size_t outputs(const struct network *n) {
	return (size_t)(n->projected && n->projected < n->hidden ? n->projected : n->hidden);
}
/* inputs are those of a layer, of one direction. */
static size_t inputs(const struct network *n, int layer) {
	return layer < n->directions ? (size_t)n->input : outputs(n) * (size_t)n->directions;
}
static size_t projection(const struct network *n) { return outputs(n) < (size_t)n->hidden ? outputs(n) * (size_t)n->hidden : 0; }
/* matrices are the elements of a layer's matrices: all of the input, those of the state, and the projection. */
static size_t matrices(const struct network *n, int layer) {
	return gates(n) * (size_t)n->hidden * (inputs(n, layer) + outputs(n)) + projection(n);
}
static size_t before(const struct network *n, int layer) {
	size_t elements = 0;
	for (int each = 0; each < layer; each++) elements += matrices(n, each);
	return elements;
}
static int all_layers(const struct network *n) { return n->layers * n->directions; }
static size_t bias_elements(const struct network *n) { return (size_t)n->biases * gates(n) * (size_t)n->hidden; }

EXPORT result cudnnGetRNNWeightSpaceSize(void *handle, struct network *n, size_t *bytes) {
	*bytes = (before(n, all_layers(n)) + (size_t)all_layers(n) * bias_elements(n)) * (size_t)n->width;
	return SUCCESS;
}
/* Matrices of all layers come first. */
EXPORT result cudnnGetRNNWeightParams(void *handle, struct network *n, int layer, size_t bytes, char *weights, int number,
	struct tensor *matrix, char **at, struct tensor *bias, char **bias_at) {
	size_t hidden = (size_t)n->hidden, count = gates(n), which = (size_t)number;
	int is_of_input = which < count, is_projection = which == 2 * count;
	size_t columns = is_of_input ? inputs(n, layer) : is_projection ? hidden : outputs(n);
	size_t rows = is_projection ? outputs(n) : hidden;
	size_t skipped = is_of_input ? which * hidden * columns
		: count * hidden * inputs(n, layer) + (which - count) * hidden * outputs(n);
	if (matrix && at) {
		*matrix = (struct tensor){0, 3, {1, (int)rows, (int)columns}};
		*at = weights + (before(n, layer) + skipped) * (size_t)n->width;
	}
	if (bias && bias_at) {
		*bias = (struct tensor){0, 3, {1, n->hidden, 1}};
		*bias_at = weights + (before(n, all_layers(n)) + (size_t)layer * bias_elements(n) + which * hidden) * (size_t)n->width;
	}
	return SUCCESS;
}
EXPORT result cudnnGetTensorNdDescriptor(struct tensor *t, int most, int *type, int *count, int *sizes, int *strides) {
	*type = t->type, *count = t->count;
	for (int i = t->count - 1, stride = 1; i >= 0 && i < most; stride *= t->sizes[i--])
		sizes[i] = t->sizes[i], strides[i] = stride;
	return SUCCESS;
}
/* What is kept is not documented. A backward pass needs the gates and the state of each step at least, and of an LSTM or GRU
 * one more product.
 */
EXPORT result cudnnGetRNNTempSpaceSizes(void *handle, struct network *n, int trains, struct sequences *s, size_t *work,
	size_t *reserve) {
	size_t kept = gates(n) + (n->cell >= 2 ? 2 : 1), states = (size_t)s->steps * (size_t)s->batch * (size_t)n->hidden;
	if (work) *work = 0;
	if (reserve) *reserve = trains ? kept * states * (size_t)all_layers(n) * (size_t)n->width : 0;
	if (trains) ghost_estimate("what cuDNN keeps of a recurrent network for its backward pass");
	return SUCCESS;
}
