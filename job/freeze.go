package job

import (
	"slices"

	"plimsoll/dtype"
	"plimsoll/fault"
)

// freeze freezes the parameters that a framework's file does not train.
func (r *resolver) freeze() error {
	f := r.Inputs.framework
	if f == nil || f.Freeze == nil {
		return nil
	}
	j := r.job
	widens := f.Freeze.Widens && j.ParameterType != dtype.F32
	if (j.FSDP != nil || r.Request.FSDP != "") && widens && !f.Freeze.BeforeSharding {
		return fault.File(f.File).Inputf("a part of the layers is trained in fp32 beside frozen ones in %v, which is "+
			"not planned with FSDP", j.ParameterType).WithHint("plan it with DeepSpeed or on one GPU")
	}
	partly := *j.Model
	partly.Parameters = slices.Clone(partly.Parameters)
	names := make([]string, len(partly.Parameters))
	for i, p := range partly.Parameters {
		names[i] = p.Name
	}
	trained, err := f.Freeze.Trained(names, len(partly.Network.Blocks()))
	if err != nil {
		return err
	}
	for i := range partly.Parameters {
		p := &partly.Parameters[i]
		p.Frozen = p.Frozen || !trained[i]
		p.Wide = p.Wide || trained[i] && widens
	}
	j.Model = &partly
	return nil
}
