package recipe

import (
	"fmt"
	"strings"
)

// Attentions are the names of attention implementations in transformers.
var Attentions = map[string]string{"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash",
	"flash_attention_3": "flash3", "flash_attention_4": "flash4",
	"kernels-community/flash-attn": "flash", "kernels-community/flash-attn2": "flash",
	"kernels-community/flash-attn3": "flash3", "kernels-community/vllm-flash-attn3": "flash3"}

// ReadAttention reads an attention implementation.
func (r *Reader) ReadAttention(key string) error {
	v := r.Find(key)
	if v == nil {
		return nil
	}
	name, _, _ := strings.Cut(v.Text, "@")
	name, _, _ = strings.Cut(name, ":")
	if r.To.Attention = Attentions[name]; r.To.Attention == "" {
		return r.Fault(key, fmt.Sprintf("is %s, an attention that is not planned yet", v),
			"plimsoll plans eager, sdpa, and flash_attention_2 to flash_attention_4")
	}
	return nil
}
