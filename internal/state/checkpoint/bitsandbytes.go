package checkpoint

import (
	"errors"
	"fmt"
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
	wrapped := member(state, wrappedState)
	if wrapped == nil && member(state, "state1") == nil {
		return state, nil
	}
	if len(entries(state))+len(entries(wrapped)) > maxStateMembers {
		return nil, fmt.Errorf("its state has more than %d members", maxStateMembers)
	}
	merged, plain := &dict{}, &dict{}
	merged.entries = append(append(merged.entries, entries(state)...), entries(wrapped)...)
	moments := []string{"exp_avg", "exp_avg_sq"}
	if member(merged, "state2") == nil {
		moments = moments[:1]
		if betas, _ := member(group, "betas").(tuple); len(betas) != 2 || betas[1] == any(int64(0)) ||
			betas[1] == any(float64(0)) {
			return nil, errors.New("its state of bitsandbytes has one moment, and only Lion's is read: Lion's second " +
				"of two betas is not 0")
		}
	}
	taken := map[any]bool{wrappedState: true}
	for i, name := range moments {
		key := func(of string) string { taken[of+fmt.Sprint(i+1)] = true; return of + fmt.Sprint(i+1) }
		moment := member(merged, key("state"))
		table, scales := member(merged, key("qmap")), member(merged, key("absmax"))
		if table != nil || scales != nil {
			moment = &object{class{bitsandbytes, blockwise}, nil, &dict{entries: []entry{
				{"codes", moment}, {"scale", scales}, {"qmap", table},
			}}}
		}
		plain.entries = append(plain.entries, entry{name, moment})
	}
	for _, e := range merged.entries {
		if !taken[e.key] {
			plain.entries = append(plain.entries, e)
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
