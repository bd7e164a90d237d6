package foreign

import (
	"errors"
	"fmt"

	"plimsoll/internal/base/pickle"
)

// bitsandbytes names moments by number, and keeps codes, tables and scales beside each other.
const (
	wrappedState = "__bnb_optimizer_quant_state__"
	bitsandbytes = "bitsandbytes.optim.optimizer"
	blockwise    = "Optimizer8bit"
)

// blockSizes are the numbers that share a scale, of releases from 0.44 on and before.
var blockSizes = []int64{256, 2048}

// plainState returns a state with the names and tensors of torch.optim. It changes only states of bitsandbytes: those
// of AdamW have two moments, and those of Lion one.
func plainState(state, group any) (any, error) {
	wrapped := pickle.Member(state, wrappedState)
	if wrapped == nil && pickle.Member(state, "state1") == nil {
		return state, nil
	}
	if len(pickle.Entries(state))+len(pickle.Entries(wrapped)) > maxStateMembers {
		return nil, fmt.Errorf("its state has more than %d members", maxStateMembers)
	}
	merged, plain := &pickle.Dict{}, &pickle.Dict{}
	merged.Entries = append(append(merged.Entries, pickle.Entries(state)...), pickle.Entries(wrapped)...)
	moments := []string{"exp_avg", "exp_avg_sq"}
	if pickle.Member(merged, "state2") == nil {
		moments = moments[:1]
		if betas, _ := pickle.Member(group, "betas").(pickle.Tuple); len(betas) != 2 || betas[1] == any(int64(0)) ||
			betas[1] == any(float64(0)) {
			return nil, errors.New("its state of bitsandbytes has one moment, and only Lion's is read: Lion's second " +
				"of two betas is not 0")
		}
	}
	taken := map[any]bool{wrappedState: true}
	for i, name := range moments {
		key := func(of string) string { taken[of+fmt.Sprint(i+1)] = true; return of + fmt.Sprint(i+1) }
		moment := pickle.Member(merged, key("state"))
		table, scales := pickle.Member(merged, key("qmap")), pickle.Member(merged, key("absmax"))
		if table != nil || scales != nil {
			state := pickle.NewDict("codes", moment, "scale", scales, "qmap", table)
			moment = &pickle.Object{Class: pickle.Class{Module: bitsandbytes, Name: blockwise}, State: state}
		}
		plain.Entries = append(plain.Entries, pickle.Entry{Key: name, Value: moment})
	}
	for _, e := range merged.Entries {
		if !taken[e.Key] {
			plain.Entries = append(plain.Entries, e)
		}
	}
	return plain, nil
}

// blockOf returns how many numbers share a scale. The last block may be shorter.
func blockOf(count, scales int64) (int64, error) {
	for _, block := range blockSizes {
		if (count+block-1)/block == scales {
			return block, nil
		}
	}
	return 0, fmt.Errorf("%d numbers with %d scales, expected one for each %d", count, scales, blockSizes[0])
}
