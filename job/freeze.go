package job

import (
	"slices"

	"plimsoll/dtype"
)

// freeze freezes the parameters that a framework's file does not train.
func (r *resolver) freeze() error {
	f := r.Inputs.framework
	if f == nil || f.Freeze == nil {
		return nil
	}
	j := r.job
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
		p.Wide = p.Wide || trained[i] && f.Freeze.Widens && j.ParameterType != dtype.F32
	}
	j.Model = &partly
	return nil
}
