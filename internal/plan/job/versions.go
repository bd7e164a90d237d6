package job

import (
	"cmp"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/version"
	"plimsoll/internal/input/recipe/deepspeed"
)

// versions parses the versions. It assumes the newest known release of torch and
// of DeepSpeed, and releases of the other programs from torch's time.
func (r *resolver) versions() error {
	v := &r.job.Versions
	torch, err := r.torchRelease()
	if err != nil {
		return err
	}
	beside := contemporaries(torch)
	if f := r.Inputs.framework; f != nil {
		if said := r.environment.ofProgram(f); said != "" {
			r.assume("%s", said)
		}
	}
	r.job.AssumesTransformers = r.Transformers == ""
	for _, program := range []struct {
		flag, text, name, newest string
		to                       *version.Version
		used                     bool
	}{
		{"--torch", r.Torch, "torch", newestTorch, &v.Torch, true},
		{"--transformers", r.Transformers, "transformers", beside.transformers, &v.Transformers, true},
		{"--accelerate-version", r.AccelerateVersion, "accelerate", beside.accelerate, &v.Accelerate,
			r.preparedByAccelerate()},
		{"--bitsandbytes", r.BitsAndBytes, "bitsandbytes", beside.bitsandbytes, &v.BitsAndBytes,
			r.Inputs.quantization != nil && r.Inputs.quantization.Method == ""},
		{"--deepspeed-version", r.DeepSpeedVersion, "DeepSpeed", deepspeed.Newest.String(), &v.DeepSpeed,
			r.job.DeepSpeed != nil},
	} {
		text := program.text
		if said := r.environment.said[strings.ToLower(program.name)]; said != "" && program.used {
			r.assume("%s", said)
		}
		if text == "" {
			text = program.newest
			if program.used {
				r.assume("%s %s: no version was given", program.name, program.newest)
			}
		}
		parsed, err := version.Parse(text)
		if err != nil {
			return &fault.Input{What: program.flag, Err: err}
		}
		*program.to = parsed
	}
	switch {
	case r.Modules == litgptModules:
		r.job.Model = r.job.Model.Untied()
	case (r.Modules == "" || r.Modules == transformersModules) && v.Transformers.AtLeast(5, 0, 0):
		r.job.Model = r.fused()
	}
	r.recurrent()
	return nil
}

// recurrent says which kernels run the layers that pass a state from token to token. Releases of transformers before
// 5.20 had other operations there (mamba2_chunk_scan and torch_chunk_gated_delta_rule are those of 5.20), and compilers
// fuse them: a plan then has a range.
func (r *resolver) recurrent() {
	if n := r.job.Model.Network; n.Opaque != nil || !n.Recurrent() {
		return
	}
	why := ""
	switch {
	case !r.job.Versions.Transformers.AtLeast(5, 20, 0):
		why = "transformers " + r.job.Versions.Transformers.String() + " computes recurrent layers otherwise than 5.20"
	case r.compiled():
		why = "it is not planned what torch.compile makes of recurrent layers"
	}
	if why != "" {
		if unknown, ok := r.job.Model.WithoutOperations(); ok {
			r.job.Model = unknown
			r.assume("%s: the plan gives a range. plimsoll plan -- PROGRAM runs your program for an exact answer",
				why)
			return
		}
	}
	r.assume("recurrent layers run as transformers computes them in PyTorch alone. With the kernels of mamba-ssm, " +
		"causal-conv1d or flash-linear-attention they keep less: plimsoll plan -- PROGRAM runs your program with " +
		"what is installed")
}

const newestTorch = "2.13.0"

// torchRelease returns the release of PyTorch.
func (q Request) torchRelease() (version.Version, error) {
	release, err := version.Parse(cmp.Or(q.Torch, newestTorch))
	if err != nil {
		return release, &fault.Input{What: "--torch", Err: err}
	}
	return release, nil
}

// deepSpeedRelease returns the release of DeepSpeed, which the reading of its configuration depends on.
func (q Request) deepSpeedRelease() (version.Version, error) {
	release, err := version.Parse(cmp.Or(q.DeepSpeedVersion, deepspeed.Newest.String()))
	if err != nil {
		return release, &fault.Input{What: "--deepspeed-version", Err: err}
	}
	return release, nil
}

// release is a release of torch with the newest releases of its time.
type release struct {
	torch                                  version.Version
	transformers, accelerate, bitsandbytes string
}

// ofTime are in the order of time, by the dates on PyPI.
var ofTime = []release{
	{version.Version{Major: 1, Minor: 0}, "4.16.0", "0.5.1", "0.26.0"},
	{version.Version{Major: 1, Minor: 12}, "4.20.0", "0.10.0", "0.31.0"},
	{version.Version{Major: 1, Minor: 13}, "4.24.0", "0.13.2", "0.35.0"},
	{version.Version{Major: 2, Minor: 0}, "4.27.0", "0.17.1", "0.37.0"},
	{version.Version{Major: 2, Minor: 1}, "4.36.0", "0.23.0", "0.41.0"},
	{version.Version{Major: 2, Minor: 2}, "4.38.0", "0.26.1", "0.42.0"},
	{version.Version{Major: 2, Minor: 3}, "4.40.0", "0.29.3", "0.43.0"},
	{version.Version{Major: 2, Minor: 4}, "4.43.0", "0.33.0", "0.43.0"},
	{version.Version{Major: 2, Minor: 5}, "4.46.0", "1.0.1", "0.44.0"},
	{version.Version{Major: 2, Minor: 6}, "4.48.0", "1.3.0", "0.45.0"},
	{version.Version{Major: 2, Minor: 7}, "4.51.0", "1.6.0", "0.45.0"},
	{version.Version{Major: 2, Minor: 8}, "4.55.0", "1.9.0", "0.46.0"},
	{version.Version{Major: 2, Minor: 9}, "4.57.0", "1.10.1", "0.48.0"},
	{version.Version{Major: 2, Minor: 10}, "5.0.0", "1.12.0", "0.49.0"},
	{version.Version{Major: 2, Minor: 13}, "5.23.0", "1.15.0", "0.49.0"},
}

// contemporaries returns the newest releases at the time of a release of torch.
func contemporaries(torch version.Version) release {
	last := ofTime[0]
	for _, r := range ofTime {
		if torch.AtLeast(r.torch.Major, r.torch.Minor, 0) {
			last = r
		}
	}
	return last
}
