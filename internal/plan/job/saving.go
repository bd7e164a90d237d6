package job

// Saving says what a program writes when it saves a checkpoint.
type Saving struct {
	// ModelOnly means that the states of the optimizer are not written: with save_only_model, or if only the model is
	// saved, at the end.
	ModelOnly bool
	// Clones means that every rank copies the full model to the host, before the first one writes it.
	Clones bool
	// FileBytes is the size of the files that the model is divided into; 0 for one file.
	FileBytes int64
}

// Sizes of the files that save_pretrained writes: 5 GB before transformers 5, and 50 GB since.
const (
	filesBefore5 = 5_000_000_000
	filesSince5  = 50_000_000_000
)

// saving decides what a checkpoint is made of. Programs of transformers save as its Trainer does: the model by
// save_pretrained, and what the engine needs to go on.
func (r *resolver) saving() error {
	j := r.job
	if t := r.training; t != nil {
		j.Saving.ModelOnly = t.Saving.ModelOnly || !t.Saving.Enabled
	}
	if !j.OfTransformers() {
		return nil
	}
	j.Saving.FileBytes = filesBefore5
	if v := j.Versions.Transformers; v.IsZero() || v.AtLeast(5, 0, 0) {
		j.Saving.FileBytes = filesSince5
	}
	// Accelerator.get_state_dict clones the parameters, which are views of flat tensors, since accelerate 0.21.
	v := j.Versions.Accelerate
	j.Saving.Clones = j.DeepSpeed != nil && j.DeepSpeed.ZeROStage < 3 && (v.IsZero() || v.AtLeast(0, 21, 0))
	return nil
}
