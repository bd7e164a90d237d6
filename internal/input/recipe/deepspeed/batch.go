package deepspeed

import (
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
)

// The three keys of the batch equation: train = micro x accumulation x ranks.
const (
	TrainKey        = "train_batch_size"
	MicroKey        = "train_micro_batch_size_per_gpu"
	AccumulationKey = "gradient_accumulation_steps"
)

// Batch is the number of samples. Zero is a number that the file does not give.
type Batch struct {
	Train        int `key:"train_batch_size"`               // samples of all ranks in an optimizer step
	Micro        int `key:"train_micro_batch_size_per_gpu"` // samples in a micro batch of one rank
	Accumulation int `key:"gradient_accumulation_steps"`    // micro batches of one rank in an optimizer step
}

// factor is a count with its description.
type factor struct {
	count int
	what  string
}

// ResolveBatch solves the batch equation as DeepSpeed does, for worldSize
// data-parallel ranks.
func (d *Config) ResolveBatch(worldSize int) (Batch, error) {
	if worldSize < 1 {
		return Batch{}, fault.Inputf("there are %d data-parallel ranks, expected at least 1", worldSize)
	}
	if d.elasticity != (fault.Position{}) {
		return Batch{}, d.elasticity.Inputf("elasticity is enabled: DeepSpeed chooses the batch when the job starts").
			WithHint(`turn elasticity off and give "` + MicroKey + `"`)
	}
	b := d.Batch
	if b.Train == 0 && b.Micro == 0 {
		return Batch{}, fault.File(d.File).Inputf("neither %s nor %s is given as a number", TrainKey, MicroKey).
			WithHint(`add "` + MicroKey + `": 1, or the number that the trainer's arguments set`)
	}

	var given []factor
	if b.Micro > 0 {
		given = append(given, d.given(MicroKey, b.Micro))
	}
	if b.Accumulation > 0 {
		given = append(given, d.given(AccumulationKey, b.Accumulation))
	}
	given = append(given, factor{worldSize, fmt.Sprintf("%d ranks", worldSize)})
	product, ok := multiply(given)
	if !ok {
		return Batch{}, d.numbers[MicroKey].where.Inputf("%s exceeds 64 bits", describe(given))
	}

	complete := b.Micro > 0 && b.Accumulation > 0
	switch {
	case b.Train == 0:
		b.Train, b.Accumulation = product, max(b.Accumulation, 1)
	case complete && b.Train != product:
		return Batch{}, d.contradiction(fmt.Sprintf("but %s is %d", describe(given), product),
			d.fitting(product/worldSize)+
				fmt.Sprintf("set it to %d, or remove one of the three keys: DeepSpeed then derives it", product))
	case complete:
	case b.Train%product != 0:
		return Batch{}, d.contradiction(fmt.Sprintf("expected a multiple of %d: %s", product, describe(given)),
			d.fitting(product/worldSize)+fmt.Sprintf("set it to %d", max(product, b.Train/product*product)))
	case b.Micro > 0:
		b.Accumulation = b.Train / product
	default:
		b.Micro, b.Accumulation = b.Train/product, max(b.Accumulation, 1)
	}
	return b, nil
}

// fitting names the numbers of ranks that the batch would be divided among evenly, each rank having a multiple of one.
// With micro batch and accumulation given, only one number goes.
func (d *Config) fitting(one int) string {
	b := d.Batch
	if b.Train%one != 0 {
		return ""
	}
	most := b.Train / one
	var counts []string
	for ranks := 1; ranks <= min(most, 1<<20) && len(counts) < 8; ranks++ {
		if most%ranks == 0 && (b.Micro == 0 || b.Accumulation == 0 || ranks == most) {
			counts = append(counts, strconv.Itoa(ranks))
		}
	}
	if len(counts) == 0 {
		return ""
	}
	return fmt.Sprintf("use %s GPUs in all, or ", fault.OneOf(counts...))
}

func (d *Config) contradiction(what, hint string) error {
	return d.numbers[TrainKey].where.Inputf("%s is %d, %s", TrainKey, d.Batch.Train, what).WithHint(hint)
}

// given returns a number of the file with its place.
func (d *Config) given(key string, count int) factor {
	return factor{count, fmt.Sprintf("%s %d (line %d)", key, count, d.numbers[key].where.Line)}
}

func describe(factors []factor) string {
	parts := make([]string, len(factors))
	for i, f := range factors {
		parts[i] = f.what
	}
	return strings.Join(parts, " x ")
}

// multiply returns the product of positive counts and reports whether an int
// holds it.
func multiply(factors []factor) (int, bool) {
	product := uint64(1)
	for _, f := range factors {
		high, low := bits.Mul64(product, uint64(f.count))
		if high != 0 || low > math.MaxInt {
			return 0, false
		}
		product = low
	}
	return int(product), true
}
