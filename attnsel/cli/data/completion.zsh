#compdef attnsel

_cyclopts_attnsel() {
  local line state

  _arguments -C \
    '--help[Display this message and exit.]' \
    '-h[Display this message and exit.]' \
    '--version[Display application version.]' \
    '1: :->cmds' \
    '*::arg:->args'

  case $state in
    cmds)
      local -a commands
      commands=(
        'explain:Which attention kernel runs this call, why each of the others cannot, and how t…'
        'can-i-use:Which kernels have a feature, on which GPUs, and from which release on; or what…'
        'compare:Which answers change from one machine to another, and the codes that change the…'
        'check:Whether every question of a baseline is still answered as it says, for CI.'
        'rules:Every rule\: its code and title, which candidates it is about, where it holds, w…'
        'rule:The page of one rule\: what it says, why, where it holds, what it rests on, and …'
        'gpus:The GPUs that --gpu knows\: name, architecture, memory, SMs. \"-\" is not known.'
        'prove:Run attnsel'\''s GPU tests on this card, then its kernel benchmark, and write one …'
        'run:Run a program that imports flash_attn, unchanged, with attnsel'\''s functions unde…'
        'replay:Print a short program that makes a failed call again, for an upstream issue.'
        'watch:Run a program unchanged, and tell what attention it ran, where, how often, and …'
        'doctor:What is installed here, what a plain causal call gets on each device, and what …'
        'completion:A script that completes commands, flags, GPUs and the values that a flag knows.'
      )
      _describe -t commands 'command' commands
      ;;
    args)
      case $words[1] in
        explain)
          case ${words[CURRENT]} in
            --params=*)
              compset -P '--params='
              _files
              return
              ;;
            --dtype=*)
              compset -P '--dtype='
              compadd -- 'bf16' 'fp16' 'fp32' 'fp64' 'fp8_e4m3' 'fp8_e5m2'
              return
              ;;
            --attn-mask-type=*)
              compset -P '--attn-mask-type='
              compadd -- 'no_mask' 'padding' 'causal' 'padding_causal' 'causal_bottom_right' 'padding_causal_bottom_right' 'arbitrary'
              return
              ;;
            --mask=*)
              compset -P '--mask='
              compadd -- 'no_mask' 'padding' 'causal' 'padding_causal' 'causal_bottom_right' 'padding_causal_bottom_right' 'arbitrary'
              return
              ;;
            --core-attention-bias-type=*)
              compset -P '--core-attention-bias-type='
              compadd -- 'no_bias' 'pre_scale_bias' 'post_scale_bias' 'alibi'
              return
              ;;
            --core-attention-bias-shape=*)
              compset -P '--core-attention-bias-shape='
              compadd -- 'bhss' '1hss' 'b1ss' '11ss' '111s'
              return
              ;;
            --softmax-type=*)
              compset -P '--softmax-type='
              compadd -- 'vanilla' 'off-by-one' 'learnable'
              return
              ;;
            --kv-cache=*)
              compset -P '--kv-cache='
              compadd -- 'none' 'contiguous' 'paged'
              return
              ;;
            --cp-comm-type=*)
              compset -P '--cp-comm-type='
              compadd -- 'p2p' 'all_gather' 'a2a' 'a2a+p2p'
              return
              ;;
            --fp8-recipe=*)
              compset -P '--fp8-recipe='
              compadd -- 'delayed' 'current' 'mxfp8' 'block'
              return
              ;;
            --gpu=*)
              compset -P '--gpu='
              compadd -- 'V100' 'V10016GB' 'V100PCIe' 'V100PCIe16GB' 'V100S' 'T4' 'T4G' 'A100' 'A10040GB' 'A100PCIe' 'A100PCIe40GB' 'A10064GB' 'A100X' 'A800' 'A800PCIe' 'A800PCIe40GB' 'A30' 'A30X' 'A2' 'A10' 'A10G' 'A16' 'A40' 'L2' 'L4' 'L20' 'L40' 'L40S' 'L40G' 'H100' 'H100PCIe' 'H100NVL' 'H10096GB' 'H10064GB' 'H800' 'H800PCIe' 'H20' 'H20141GB' 'H200' 'H200NVL' 'GH200' 'GH200144GB' 'B100' 'B200' 'GB200' 'B300' 'GB300' 'QuadroGV100' 'TITANV' 'TITANRTX' 'QuadroRTX3000' 'QuadroRTX4000' 'QuadroRTX4000Laptop' 'QuadroRTX5000' 'QuadroRTX6000' 'QuadroRTX8000' 'T400' 'T4004GB' 'T500Laptop' 'T550Laptop' 'T600' 'T600Laptop' 'T1000' 'T10008GB' 'T1200Laptop' 'QuadroT1000' 'QuadroT2000' 'RTXA400' 'RTXA500Laptop' 'RTXA1000' 'RTXA1000Laptop' 'RTXA1000Laptop6GB' 'RTXA2000' 'RTXA200012GB' 'RTXA2000Laptop' 'RTXA2000Laptop8GB' 'RTXA3000Laptop' 'RTXA3000Laptop12GB' 'RTXA4000' 'RTXA4000Laptop' 'RTXA4500' 'RTXA4500Laptop' 'RTXA5000' 'RTXA5000Laptop' 'RTXA5500' 'RTXA5500Laptop' 'RTXA6000' 'RTX500AdaLaptop' 'RTX1000AdaLaptop' 'RTX2000Ada' 'RTX2000AdaLaptop' 'RTX3000AdaLaptop' 'RTX3500AdaLaptop' 'RTX4000Ada' 'RTX4000SFFAda' 'RTX4000AdaLaptop' 'RTX4500Ada' 'RTX5000Ada' 'RTX5000AdaLaptop' 'RTX5880Ada' 'RTX6000Ada' 'RTXPRO500Laptop' 'RTXPRO1000Laptop' 'RTXPRO2000' 'RTXPRO2000Laptop' 'RTXPRO3000Laptop' 'RTXPRO4000' 'RTXPRO4000SFF' 'RTXPRO4000Laptop' 'RTXPRO4500' 'RTXPRO5000' 'RTXPRO500072GB' 'RTXPRO5000Laptop' 'RTXPRO6000' 'RTXPRO6000Max-Q' 'RTXPRO4500Server' 'RTXPRO6000Server' 'GB10' 'GTX1630' 'GTX1650' 'GTX1650Laptop' 'GTX1650TiLaptop' 'GTX1650SUPER' 'GTX1660' 'GTX1660SUPER' 'GTX1660Ti' 'MX450' 'MX550' 'RTX2060' 'RTX206012GB' 'RTX2060SUPER' 'RTX2070' 'RTX2070SUPER' 'RTX2080' 'RTX2080SUPER' 'RTX2080Ti' 'MX570' 'RTX2050Laptop' 'RTX3050' 'RTX30506GB' 'RTX3050Laptop' 'RTX3050Laptop6GB' 'RTX3050TiLaptop' 'RTX3060' 'RTX30608GB' 'RTX3060Laptop' 'RTX3060Ti' 'RTX3070' 'RTX3070Laptop' 'RTX3070Ti' 'RTX3070TiLaptop' 'RTX3080' 'RTX308012GB' 'RTX3080Laptop' 'RTX3080Laptop16GB' 'RTX3080Ti' 'RTX3080TiLaptop' 'RTX3090' 'RTX3090Ti' 'RTX4050Laptop' 'RTX4060' 'RTX4060Laptop' 'RTX4060Ti' 'RTX4060Ti16GB' 'RTX4070' 'RTX4070Laptop' 'RTX4070SUPER' 'RTX4070Ti' 'RTX4070TiSUPER' 'RTX4080' 'RTX4080Laptop' 'RTX4080SUPER' 'RTX4090' 'RTX4090D' 'RTX4090Laptop' 'RTX5050' 'RTX5050Laptop' 'RTX5060' 'RTX5060Laptop' 'RTX5060Ti' 'RTX5060Ti8GB' 'RTX5070' 'RTX5070Laptop' 'RTX5070Ti' 'RTX5070TiLaptop' 'RTX5080' 'RTX5080Laptop' 'RTX5090' 'RTX5090D' 'RTX5090DV2' 'RTX5090Laptop' 'Xavier' 'AGXXavier' 'AGXXavier64GB' 'AGXXavier16GB' 'XavierNX' 'XavierNX16GB' 'Orin' 'AGXOrin' 'AGXOrin32GB' 'OrinNX' 'OrinNX8GB' 'OrinNano' 'OrinNano4GB' 'Thor' 'JetsonT5000' 'JetsonT4000' 'A80040GB' 'AX800' 'A10M' 'H800NVL' 'T400E' 'RTXA4000H' 'RTXA500Embedded' 'RTXA1000Embedded' 'RTXA2000Embedded' 'RTXA4500Embedded' 'RTX2000EAda' 'RTX2000AdaEmbedded' 'RTX3500AdaEmbedded' 'RTX5000AdaEmbedded' 'RTX6000D' 'RTXPRO500Embedded' 'RTXPRO2000Embedded' 'RTXPRO4000Embedded' 'RTXPRO5000Embedded' 'MX570A' 'RTX3050OEM' 'RTX3050ALaptop' 'CMP100HX' 'CMP30HX' 'CMP40HX' 'CMP50HX' 'CMP170HX' 'CMP170HX10GB' 'CMP70HX' 'CMP90HX' 'P100' 'P100PCIe' 'P100PCIe12GB' 'P40' 'P4' 'P6' 'M60' 'M40' 'M10' 'QuadroGP100' 'QuadroP6000' 'QuadroP5000' 'QuadroP5200' 'QuadroP4200' 'QuadroP4000' 'QuadroP3200' 'QuadroP3000' 'QuadroP2200' 'QuadroP2000' 'QuadroP1000' 'QuadroP620' 'QuadroP600' 'QuadroP520' 'QuadroP500' 'QuadroP400' 'QuadroM6000' 'QuadroM600024GB' 'QuadroM5000' 'QuadroM5500' 'QuadroM4000' 'QuadroM2000' 'QuadroM2200' 'QuadroM5000M' 'QuadroM4000M' 'QuadroM3000M' 'QuadroK2200' 'QuadroK1200' 'QuadroK620' 'QuadroM1200' 'QuadroM620' 'QuadroM2000M' 'QuadroM1000M' 'QuadroM600M' 'QuadroM520' 'NVS810' 'TITANXp' 'TITANX' 'GTX1080Ti' 'GTX1080' 'GTX1070Ti' 'GTX1070' 'GTX1060' 'GTX10603GB' 'GTX10605GB' 'GTX1050Ti' 'GTX1050' 'GTX10503GB' 'GT1030' 'GTX1080Laptop' 'GTX1070Laptop' 'GTX1060Laptop' 'GTX1060Laptop3GB' 'GTX1050TiLaptop' 'GTX1050Laptop' 'GTX1050Laptop2GB' 'MX350' 'MX330' 'MX250' 'MX230' 'MX150' 'GTXTITANX' 'GTX980Ti' 'GTX980' 'GTX970' 'GTX960' 'GTX950' 'GTX980M' 'GTX970M' 'GTX965M' 'GTX750Ti' 'GTX750' 'GTX745' 'GTX960M' 'GTX950M' 'GTX850M' 'GTX860M' 'GeForce940MX' 'GeForce930MX' 'MX130' 'MX110' 'Rubin' 'K80' 'TeslaM4' 'TeslaM6' 'QuadroP5000Laptop' 'QuadroP4000Laptop' 'QuadroP2000Laptop' 'QuadroP1000Laptop' 'QuadroP620Laptop' 'QuadroP600Laptop' 'QuadroM3000SE' 'QuadroM500M' 'QuadroK2200M' 'QuadroK620M' '830M' 'GeForce840M' '845M' '920MX' '945M' '830A' '840A' 'GTX850A' '930A' '940A' '945A' 'GTX950A' 'GTX960A' 'GTX980MX' 'GTX980Laptop' 'GT1010' 'P102-100' 'P102-101' 'P104-100' 'P104-101' 'P106-100' 'P106-090' 'P106M' 'TITANVCEOEdition' 'T10' 'P10' 'PG500-216' 'PG503-216' 'PG506-207' 'PG506-217' 'PG506-242' 'RTX4010' 'MI355X' 'MI350X' 'MI325X' 'MI300X' 'MI300A' 'MI308X' 'MI250X' 'MI250' 'MI210' 'MI200' 'MI100' 'MI60' 'MI50' 'MI25' 'MI8' 'MI6' 'AIPROR9700S' 'AIPROR9700' 'AIPROR9600D' 'PROW7900' 'PROW7800' 'PROW780048GB' 'PROW7700' 'PROV710' 'PROW7600' 'PROW7500' 'PROW6800' 'PROV620' 'PROW6900X' 'PROW6800X' 'PROW6800XDuo' 'PROW6600' 'PROW6400' 'PROW6500M' 'PROW6300' 'PROW6600M' 'PROW6600X' 'PROW5700' 'PROW5700X' 'PROV520' 'PROW5500' 'PROVII' 'PROVegaII' 'PROVegaIIDuo' 'PROWX9100' 'PROWX8200' 'PROV340' 'VegaFrontierEdition' 'PROWX7100' 'PROWX5100' 'PROWX4100' 'RX9070XT' 'RX9070' 'RX9070GRE' 'RX9060XT' 'RX9060XT8GB' 'RX9060' 'RX7900XTX' 'RX7900XT' 'RX7900GRE' 'RX7900M' 'RX7800XT' 'RX7700XT' 'RX7700' 'RX7800M' 'RX7600XT' 'RX7600' 'RX7650GRE' 'RX7400' 'RX7700S' 'RX7600MXT' 'RX7600M' 'RX7600S' 'RX6950XT' 'RX6900XT' 'RX6800XT' 'RX6800' 'RX6750XT' 'RX6700XT' 'RX6700' 'RX6750GRE' 'RX6850MXT' 'RX6800M' 'RX6700M' 'RX6650XT' 'RX6600XT' 'RX6600' 'RX6600M' 'RX6650M' 'RX6650MXT' 'RX6800S' 'RX6700S' 'RX6600S' 'RX6500XT' 'RX6500XT8GB' 'RX6400' 'RX6500M' 'RX6300M' 'RX5700XT' 'RX5700' 'RX5600XT' 'RX5600' 'RX5600M' 'RX5700M' 'RX5500XT' 'RX5500' 'RX5500M' 'RX5300' 'RX5300M' 'RadeonVII' 'RXVega64' 'RXVega56' 'RX590' 'RX580' 'RX570' 'RX560' 'RX480' 'RX470' 'RX460' 'R9Nano' 'R9Fury' 'R9FuryX' '8060S' '8050S' '8040S' '8065S' '890M' '880M' '860M' '840M' '820M' '780M' '760M' '740M' '680M' '660M' '610M' 'SteamDeck' 'Vega8' 'Vega7' 'Vega6' 'RadeonGraphics' 'ArcProB70' 'ArcProB65' 'ArcProB60' 'ArcProB50' 'ArcB580' 'ArcB570' 'ArcA770' 'ArcA7708GB' 'ArcA750' 'ArcA580' 'ArcA380' 'ArcA310' 'ArcProA60' 'ArcProA60M' 'ArcProA50' 'ArcProA40' 'ArcProA30M' 'ArcA770M' 'ArcA730M' 'ArcA570M' 'ArcA550M' 'ArcA530M' 'ArcA370M' 'ArcA350M' 'ArcB390' 'ArcB370' 'Arc140V' 'Arc130V' 'Arc140T' 'Arc130T' 'ArcGraphics' 'IrisXe' 'UHD770' 'UHD750' 'UHD730' 'IrisPlus' 'UHD630' 'UHD620' 'UHDGraphics' 'IntelGraphics' 'DataCenterGPUMax1550' 'DataCenterGPUMax1450' 'DataCenterGPUMax1350' 'DataCenterGPUMax1100' 'DataCenterGPUMax' 'Flex170' 'Flex140' 'Flex' 'Arc' 'M1' 'M1Pro' 'M1Max' 'M1Ultra' 'M2' 'M2Pro' 'M2Max' 'M2Ultra' 'M3' 'M3Pro' 'M3Max' 'M3Ultra' 'M4' 'M4Pro' 'M4Max' 'M5' 'M5Pro' 'M5Max' 'M5Ultra' 'Applesilicon' 'JetsonTX2' 'JetsonTX2NX' 'JetsonNano' 'JetsonNano2GB' 'JetsonTX1' '710A' '710M' 'GT720M' 'GT730' 'GT710' 'GT730M' 'K20c' 'K20X' 'K20Xm' 'GT735M' 'GT740A' 'GTX780' 'GTX780Ti' 'GTXTITAN' 'QuadroK510M' 'QuadroK6000' 'QuadroK610M' 'K20m' 'K20' 'K40c' 'K40m' 'K40' '805A' '810A' '825M' 'GT720' 'GT730A' 'GTXTITANBlack' 'GTXTITANZ' 'QuadroK5200' '910M' '920A' '920M' 'JetsonTK1' 'GT640MLE' 'GeForce820M' '810M' 'GT640' 'GT640M' 'GT645M' 'GT650M' 'GTX650' 'GTX650Ti' 'GTX660' 'GTX660Ti' 'GTX660M' 'GTX670' 'GTX670MX' 'GTX675MX' 'GTX680' 'GTX680M' 'GTX690' 'NVS510' 'Quadro410' 'QuadroK1000M' 'QuadroK2000M' 'QuadroK3000M' 'QuadroK4000M' 'QuadroK5000' 'QuadroK5000M' 'QuadroK500M' 'K10' 'GT740M' 'GT745A' 'GT745M' 'GT750M' 'GT755M' 'GTX650TiBoost' 'GTX760' 'GTX760M' 'GTX765M' 'GTX770' 'GTX770M' 'GTX780M' 'K1' 'K100' 'K2' 'K200' 'K340' 'K520' 'QuadroK1100M' 'QuadroK2000' 'QuadroK2000D' 'QuadroK2100M' 'QuadroK3100M' 'QuadroK4000' 'QuadroK4100M' 'QuadroK5100M' 'QuadroK600' 'GT740' 'GTX760A' 'GTX870M' 'GTX880M' 'K500' 'QuadroK100M' 'QuadroK200M' 'QuadroK420' 'QuadroK4200' 'K8' 'GT415M' 'GT420M' 'GT425M' 'GT430' 'GT435M' 'GT445M' 'GTS450' 'GTX460' 'GTX460SE' 'GTX460M' 'GTX470M' 'Quadro2000' 'Quadro600' '410M' '610' 'GeForce610M' 'GT440' 'GT520' 'GT520M' 'GT520MX' 'GT525M' 'GT540M' 'GT545' 'GT550M' 'GT555M' 'GTX485M' 'GTX550Ti' 'GTX560' 'GTX560Ti' 'GTX560M' 'GTX570M' 'GTX580M' 'NVS4200M' 'Quadro1000M' 'Quadro2000D' 'Quadro2000M' 'Quadro3000M' 'Quadro4000M' 'Quadro500M' '620M' 'GT610' 'GT620' 'GT620M' 'GT625M' 'GT630' 'GT630M' 'GT635M' 'GTX560SE' 'GTX670M' 'GTX675M' 'NVS310' 'NVS5200M' 'NVS5400M' '705A' '705M' 'GT710M' 'NVS315' '720A' '800A' '800M' '820A' 'GT720A' 'GTX465' 'GTX470' 'GTX480' 'GTX480M' 'GTX570' 'GTX580' 'Quadro4000' 'Quadro5000M' 'Quadro6000' 'GTX560Ti448' 'GTX590' 'Quadro5000' 'Quadro5010M' 'C2050' 'C2070' 'C2075' 'M2050' 'M2070' 'M2075' 'M2090' 'Quadro7000' 'GT645' 'GTX645' 'GTX760Ti' 'GTX680MX' 'GTX775M' 'GT635' 'GT420' '510' 'GT530' 'GTX555' '605' '615' 'GT625' 'GT705' 'S2050' 'X2070' 'X2090' 'C2090' 'cpu' 'rocm' 'mps' 'xpu'
              return
              ;;
            --platform=*)
              compset -P '--platform='
              compadd -- 'linux' 'darwin' 'windows' 'other'
              return
              ;;
            --torch-flash=*)
              compset -P '--torch-flash='
              compadd -- 'FA2' 'FA3' 'FA4' 'other'
              return
              ;;
            --adapt=*)
              compset -P '--adapt='
              compadd -- 'auto' 'never'
              return
              ;;
            --env=*)
              compset -P '--env='
              _files
              return
              ;;
            --from-log=*)
              compset -P '--from-log='
              _files
              return
              ;;
            --out=*)
              compset -P '--out='
              _files
              return
              ;;
            --html=*)
              compset -P '--html='
              _files
              return
              ;;
          esac
          _arguments \
            '*--params[JSON of AttentionParams, of an earlier --json, or what TransformerEngine prints…]:params:_files' \
            '*--head-dim[head dimension of queries, keys and values; 192,128 where those of values differ]:head-dim' \
            '*--seqlen[longest sequence, of queries and of keys]:seqlen' \
            '*--seq-len[longest sequence, of queries and of keys]:seq-len' \
            '*--causal[the mask type\: causal or no_mask; padding_causal or padding where sequences are…]:causal' \
            '--no-causal[the mask type\: causal or no_mask; padding_causal or padding where sequences are…]' \
            '*--sliding-window[as transformers has it\: a causal query sees N keys, its own among them, which i…]:sliding-window' \
            "*--dtype[element type of q, k and v\: bf16, fp16, fp32, fp64, fp8_e4m3, fp8_e5m2]:dtype:(bf16 fp16 fp32 fp64 fp8_e4m3 fp8_e5m2)" \
            '*--qkv-layout[memory layout, or just its format\: bshd, sbhd, thd, bhsd]:qkv-layout' \
            '*--layout[memory layout, or just its format\: bshd, sbhd, thd, bhsd]:layout' \
            '*--batch-size[sequences in the batch]:batch-size' \
            '*--batch[sequences in the batch]:batch' \
            '*--num-heads[query heads]:num-heads' \
            '*--heads[query heads]:heads' \
            '*--num-attention-heads[query heads]:num-attention-heads' \
            '*--num-gqa-groups[key/value heads; as many as query heads if 0]:num-gqa-groups' \
            '*--kv-heads[key/value heads; as many as query heads if 0]:kv-heads' \
            '*--num-kv-heads[key/value heads; as many as query heads if 0]:num-kv-heads' \
            '*--num-key-value-heads[key/value heads; as many as query heads if 0]:num-key-value-heads' \
            '*--max-seqlen-q[longest query sequence]:max-seqlen-q' \
            '*--seqlen-q[longest query sequence]:seqlen-q' \
            '*--max-seqlen-kv[longest key sequence; max_seqlen_q if -1]:max-seqlen-kv' \
            '*--seqlen-kv[longest key sequence; max_seqlen_q if -1]:seqlen-kv' \
            '*--head-dim-qk[head dimension of queries and keys]:head-dim-qk' \
            '*--head-dim-v[head dimension of values; head_dim_qk if 0]:head-dim-v' \
            "*--attn-mask-type[which pairs may attend\: no_mask, padding, causal, padding_causal, causal_bottom…]:attn-mask-type:(no_mask padding causal padding_causal causal_bottom_right padding_causal_bottom_right arbitrary)" \
            "*--mask[which pairs may attend\: no_mask, padding, causal, padding_causal, causal_bottom…]:mask:(no_mask padding causal padding_causal causal_bottom_right padding_causal_bottom_right arbitrary)" \
            '*--window-size[(left, right) keys around the diagonal, inclusive; -1 is no bound; one number i…]:window-size' \
            '--bottom-right-diagonal[anchor of windows and ALiBi; decided by a causal mask type]' \
            '--no-bottom-right-diagonal[anchor of windows and ALiBi; decided by a causal mask type]' \
            "*--core-attention-bias-type[what is added to the scores\: no_bias, pre_scale_bias, post_scale_bias, alibi]:core-attention-bias-type:(no_bias pre_scale_bias post_scale_bias alibi)" \
            "*--core-attention-bias-shape[which dimensions of the bias are not 1; 1hss if there is a bias\: bhss, 1hss, b1…]:core-attention-bias-shape:(bhss 1hss b1ss 11ss 111s)" \
            '--core-attention-bias-requires-grad[the bias needs a gradient]' \
            '--no-core-attention-bias-requires-grad[the bias needs a gradient]' \
            '*--alibi-slopes-shape[(h,) or (b, h) where slopes are given; computed from the heads if None]:alibi-slopes-shape' \
            "*--softmax-type[attention sink in the denominator\: vanilla, off-by-one, learnable]:softmax-type:(vanilla off-by-one learnable)" \
            '*--softcap[softcap * tanh(score / softcap); 0 is off]:softcap' \
            '*--attention-dropout[dropout probability]:attention-dropout' \
            '*--dropout[dropout probability]:dropout' \
            '--training[a backward pass will be needed]' \
            '--inference[a backward pass will be needed]' \
            '--deterministic[bitwise equal results run after run]' \
            '--no-deterministic[bitwise equal results run after run]' \
            '--return-lse[the log-sum-exp is needed too]' \
            '--no-return-lse[the log-sum-exp is needed too]' \
            '--return-max-logit[the largest score per head is needed too]' \
            '--no-return-max-logit[the largest score per head is needed too]' \
            "*--kv-cache[keys and values live in an inference cache\: none, contiguous, paged]:kv-cache:(none contiguous paged)" \
            '*--page-size[tokens per page of a paged cache]:page-size' \
            '--pad-between-seqs[thd\: gaps between packed sequences]' \
            '--no-pad-between-seqs[thd\: gaps between packed sequences]' \
            '*--cp-size[ranks that one sequence is spread over]:cp-size' \
            "*--cp-comm-type[how context parallel ranks exchange\: p2p, all_gather, a2a, a2a+p2p]:cp-comm-type:(p2p all_gather a2a a2a+p2p)" \
            '--cuda-graph[the call is captured into a CUDA graph]' \
            '--no-cuda-graph[the call is captured into a CUDA graph]' \
            '--fp8[inside FP8 autocast; the recipe says if attention is FP8]' \
            '--no-fp8[inside FP8 autocast; the recipe says if attention is FP8]' \
            '*--mask-dtype[for plain F.sdpa\: the element type of its attn_mask, such as fp32 or bool]:mask-dtype' \
            '*--tensor-rank[for plain F.sdpa\: dimensions of q, k and v; default 4]:tensor-rank' \
            "*--fp8-recipe[attention in FP8 under this recipe\: delayed, current, mxfp8, block]:fp8-recipe:(delayed current mxfp8 block)" \
            "*--gpu[H100, H200, B200, B300, RTX 5090, GB10 and more (attnsel gpus lists them), as d…]:gpu:(V100 V10016GB V100PCIe V100PCIe16GB V100S T4 T4G A100 A10040GB A100PCIe A100PCIe40GB A10064GB A100X A800 A800PCIe A800PCIe40GB A30 A30X A2 A10 A10G A16 A40 L2 L4 L20 L40 L40S L40G H100 H100PCIe H100NVL H10096GB H10064GB H800 H800PCIe H20 H20141GB H200 H200NVL GH200 GH200144GB B100 B200 GB200 B300 GB300 QuadroGV100 TITANV TITANRTX QuadroRTX3000 QuadroRTX4000 QuadroRTX4000Laptop QuadroRTX5000 QuadroRTX6000 QuadroRTX8000 T400 T4004GB T500Laptop T550Laptop T600 T600Laptop T1000 T10008GB T1200Laptop QuadroT1000 QuadroT2000 RTXA400 RTXA500Laptop RTXA1000 RTXA1000Laptop RTXA1000Laptop6GB RTXA2000 RTXA200012GB RTXA2000Laptop RTXA2000Laptop8GB RTXA3000Laptop RTXA3000Laptop12GB RTXA4000 RTXA4000Laptop RTXA4500 RTXA4500Laptop RTXA5000 RTXA5000Laptop RTXA5500 RTXA5500Laptop RTXA6000 RTX500AdaLaptop RTX1000AdaLaptop RTX2000Ada RTX2000AdaLaptop RTX3000AdaLaptop RTX3500AdaLaptop RTX4000Ada RTX4000SFFAda RTX4000AdaLaptop RTX4500Ada RTX5000Ada RTX5000AdaLaptop RTX5880Ada RTX6000Ada RTXPRO500Laptop RTXPRO1000Laptop RTXPRO2000 RTXPRO2000Laptop RTXPRO3000Laptop RTXPRO4000 RTXPRO4000SFF RTXPRO4000Laptop RTXPRO4500 RTXPRO5000 RTXPRO500072GB RTXPRO5000Laptop RTXPRO6000 RTXPRO6000Max-Q RTXPRO4500Server RTXPRO6000Server GB10 GTX1630 GTX1650 GTX1650Laptop GTX1650TiLaptop GTX1650SUPER GTX1660 GTX1660SUPER GTX1660Ti MX450 MX550 RTX2060 RTX206012GB RTX2060SUPER RTX2070 RTX2070SUPER RTX2080 RTX2080SUPER RTX2080Ti MX570 RTX2050Laptop RTX3050 RTX30506GB RTX3050Laptop RTX3050Laptop6GB RTX3050TiLaptop RTX3060 RTX30608GB RTX3060Laptop RTX3060Ti RTX3070 RTX3070Laptop RTX3070Ti RTX3070TiLaptop RTX3080 RTX308012GB RTX3080Laptop RTX3080Laptop16GB RTX3080Ti RTX3080TiLaptop RTX3090 RTX3090Ti RTX4050Laptop RTX4060 RTX4060Laptop RTX4060Ti RTX4060Ti16GB RTX4070 RTX4070Laptop RTX4070SUPER RTX4070Ti RTX4070TiSUPER RTX4080 RTX4080Laptop RTX4080SUPER RTX4090 RTX4090D RTX4090Laptop RTX5050 RTX5050Laptop RTX5060 RTX5060Laptop RTX5060Ti RTX5060Ti8GB RTX5070 RTX5070Laptop RTX5070Ti RTX5070TiLaptop RTX5080 RTX5080Laptop RTX5090 RTX5090D RTX5090DV2 RTX5090Laptop Xavier AGXXavier AGXXavier64GB AGXXavier16GB XavierNX XavierNX16GB Orin AGXOrin AGXOrin32GB OrinNX OrinNX8GB OrinNano OrinNano4GB Thor JetsonT5000 JetsonT4000 A80040GB AX800 A10M H800NVL T400E RTXA4000H RTXA500Embedded RTXA1000Embedded RTXA2000Embedded RTXA4500Embedded RTX2000EAda RTX2000AdaEmbedded RTX3500AdaEmbedded RTX5000AdaEmbedded RTX6000D RTXPRO500Embedded RTXPRO2000Embedded RTXPRO4000Embedded RTXPRO5000Embedded MX570A RTX3050OEM RTX3050ALaptop CMP100HX CMP30HX CMP40HX CMP50HX CMP170HX CMP170HX10GB CMP70HX CMP90HX P100 P100PCIe P100PCIe12GB P40 P4 P6 M60 M40 M10 QuadroGP100 QuadroP6000 QuadroP5000 QuadroP5200 QuadroP4200 QuadroP4000 QuadroP3200 QuadroP3000 QuadroP2200 QuadroP2000 QuadroP1000 QuadroP620 QuadroP600 QuadroP520 QuadroP500 QuadroP400 QuadroM6000 QuadroM600024GB QuadroM5000 QuadroM5500 QuadroM4000 QuadroM2000 QuadroM2200 QuadroM5000M QuadroM4000M QuadroM3000M QuadroK2200 QuadroK1200 QuadroK620 QuadroM1200 QuadroM620 QuadroM2000M QuadroM1000M QuadroM600M QuadroM520 NVS810 TITANXp TITANX GTX1080Ti GTX1080 GTX1070Ti GTX1070 GTX1060 GTX10603GB GTX10605GB GTX1050Ti GTX1050 GTX10503GB GT1030 GTX1080Laptop GTX1070Laptop GTX1060Laptop GTX1060Laptop3GB GTX1050TiLaptop GTX1050Laptop GTX1050Laptop2GB MX350 MX330 MX250 MX230 MX150 GTXTITANX GTX980Ti GTX980 GTX970 GTX960 GTX950 GTX980M GTX970M GTX965M GTX750Ti GTX750 GTX745 GTX960M GTX950M GTX850M GTX860M GeForce940MX GeForce930MX MX130 MX110 Rubin K80 TeslaM4 TeslaM6 QuadroP5000Laptop QuadroP4000Laptop QuadroP2000Laptop QuadroP1000Laptop QuadroP620Laptop QuadroP600Laptop QuadroM3000SE QuadroM500M QuadroK2200M QuadroK620M 830M GeForce840M 845M 920MX 945M 830A 840A GTX850A 930A 940A 945A GTX950A GTX960A GTX980MX GTX980Laptop GT1010 P102-100 P102-101 P104-100 P104-101 P106-100 P106-090 P106M TITANVCEOEdition T10 P10 PG500-216 PG503-216 PG506-207 PG506-217 PG506-242 RTX4010 MI355X MI350X MI325X MI300X MI300A MI308X MI250X MI250 MI210 MI200 MI100 MI60 MI50 MI25 MI8 MI6 AIPROR9700S AIPROR9700 AIPROR9600D PROW7900 PROW7800 PROW780048GB PROW7700 PROV710 PROW7600 PROW7500 PROW6800 PROV620 PROW6900X PROW6800X PROW6800XDuo PROW6600 PROW6400 PROW6500M PROW6300 PROW6600M PROW6600X PROW5700 PROW5700X PROV520 PROW5500 PROVII PROVegaII PROVegaIIDuo PROWX9100 PROWX8200 PROV340 VegaFrontierEdition PROWX7100 PROWX5100 PROWX4100 RX9070XT RX9070 RX9070GRE RX9060XT RX9060XT8GB RX9060 RX7900XTX RX7900XT RX7900GRE RX7900M RX7800XT RX7700XT RX7700 RX7800M RX7600XT RX7600 RX7650GRE RX7400 RX7700S RX7600MXT RX7600M RX7600S RX6950XT RX6900XT RX6800XT RX6800 RX6750XT RX6700XT RX6700 RX6750GRE RX6850MXT RX6800M RX6700M RX6650XT RX6600XT RX6600 RX6600M RX6650M RX6650MXT RX6800S RX6700S RX6600S RX6500XT RX6500XT8GB RX6400 RX6500M RX6300M RX5700XT RX5700 RX5600XT RX5600 RX5600M RX5700M RX5500XT RX5500 RX5500M RX5300 RX5300M RadeonVII RXVega64 RXVega56 RX590 RX580 RX570 RX560 RX480 RX470 RX460 R9Nano R9Fury R9FuryX 8060S 8050S 8040S 8065S 890M 880M 860M 840M 820M 780M 760M 740M 680M 660M 610M SteamDeck Vega8 Vega7 Vega6 RadeonGraphics ArcProB70 ArcProB65 ArcProB60 ArcProB50 ArcB580 ArcB570 ArcA770 ArcA7708GB ArcA750 ArcA580 ArcA380 ArcA310 ArcProA60 ArcProA60M ArcProA50 ArcProA40 ArcProA30M ArcA770M ArcA730M ArcA570M ArcA550M ArcA530M ArcA370M ArcA350M ArcB390 ArcB370 Arc140V Arc130V Arc140T Arc130T ArcGraphics IrisXe UHD770 UHD750 UHD730 IrisPlus UHD630 UHD620 UHDGraphics IntelGraphics DataCenterGPUMax1550 DataCenterGPUMax1450 DataCenterGPUMax1350 DataCenterGPUMax1100 DataCenterGPUMax Flex170 Flex140 Flex Arc M1 M1Pro M1Max M1Ultra M2 M2Pro M2Max M2Ultra M3 M3Pro M3Max M3Ultra M4 M4Pro M4Max M5 M5Pro M5Max M5Ultra Applesilicon JetsonTX2 JetsonTX2NX JetsonNano JetsonNano2GB JetsonTX1 710A 710M GT720M GT730 GT710 GT730M K20c K20X K20Xm GT735M GT740A GTX780 GTX780Ti GTXTITAN QuadroK510M QuadroK6000 QuadroK610M K20m K20 K40c K40m K40 805A 810A 825M GT720 GT730A GTXTITANBlack GTXTITANZ QuadroK5200 910M 920A 920M JetsonTK1 GT640MLE GeForce820M 810M GT640 GT640M GT645M GT650M GTX650 GTX650Ti GTX660 GTX660Ti GTX660M GTX670 GTX670MX GTX675MX GTX680 GTX680M GTX690 NVS510 Quadro410 QuadroK1000M QuadroK2000M QuadroK3000M QuadroK4000M QuadroK5000 QuadroK5000M QuadroK500M K10 GT740M GT745A GT745M GT750M GT755M GTX650TiBoost GTX760 GTX760M GTX765M GTX770 GTX770M GTX780M K1 K100 K2 K200 K340 K520 QuadroK1100M QuadroK2000 QuadroK2000D QuadroK2100M QuadroK3100M QuadroK4000 QuadroK4100M QuadroK5100M QuadroK600 GT740 GTX760A GTX870M GTX880M K500 QuadroK100M QuadroK200M QuadroK420 QuadroK4200 K8 GT415M GT420M GT425M GT430 GT435M GT445M GTS450 GTX460 GTX460SE GTX460M GTX470M Quadro2000 Quadro600 410M 610 GeForce610M GT440 GT520 GT520M GT520MX GT525M GT540M GT545 GT550M GT555M GTX485M GTX550Ti GTX560 GTX560Ti GTX560M GTX570M GTX580M NVS4200M Quadro1000M Quadro2000D Quadro2000M Quadro3000M Quadro4000M Quadro500M 620M GT610 GT620 GT620M GT625M GT630 GT630M GT635M GTX560SE GTX670M GTX675M NVS310 NVS5200M NVS5400M 705A 705M GT710M NVS315 720A 800A 800M 820A GT720A GTX465 GTX470 GTX480 GTX480M GTX570 GTX580 Quadro4000 Quadro5000M Quadro6000 GTX560Ti448 GTX590 Quadro5000 Quadro5010M C2050 C2070 C2075 M2050 M2070 M2075 M2090 Quadro7000 GT645 GTX645 GTX760Ti GTX680MX GTX775M GT635 GT420 510 GT530 GTX555 605 615 GT625 GT705 S2050 X2070 X2090 C2090 cpu rocm mps xpu)" \
            '*--torch[version of torch, or none where it is not installed]:torch' \
            '*--triton[version of triton, or none where it is not installed]:triton' \
            '*--cudnn[version of cudnn, or none where it is not installed]:cudnn' \
            '*--cudnn-frontend[version of cudnn-frontend, or none where it is not installed]:cudnn-frontend' \
            '*--cuda[version of cuda, or none where it is not installed]:cuda' \
            '*--python[version of python, or none where it is not installed]:python' \
            '*--flash-attn[version of flash-attn, or none where it is not installed]:flash-attn' \
            '*--flash-attn-3[version of flash-attn-3, or none where it is not installed]:flash-attn-3' \
            '*--flash-attn-4[version of flash-attn-4, or none where it is not installed]:flash-attn-4' \
            '*--transformer-engine[version of transformer-engine, or none where it is not installed]:transformer-engine' \
            "*--platform[linux, darwin, windows, other]:platform:(linux darwin windows other)" \
            "*--torch-flash[what answers torch's own flash attention\: activate_flash_attention_impl\: FA2, F…]:torch-flash:(FA2 FA3 FA4 other)" \
            '*--missing[libraries that are not there, or do not load\: libnvrtc, libcudnn]:missing' \
            '*--backend[run this candidate or raise with its reasons; never another]:backend' \
            '*--allow[only these candidates, in this order of preference; commas between]:allow' \
            '*--deny[never these candidates; commas between]:deny' \
            "*--adapt[whether a call may be changed exactly (a mask folded, a copy made)\: auto, never]:adapt:(auto never)" \
            '*--allow-known-bugs[BUG codes to ignore, for those who know their build is patched; commas between]:allow-known-bugs' \
            '--preview[let rules refuse that are still tried out]' \
            '--no-preview[let rules refuse that are still tried out]' \
            '*--memory-limit[most memory, such as 2GiB, that a call may take for scores, masks, copies and t…]:memory-limit' \
            '*--figures[a file of explain --measure\: what was measured here goes before what was publis…]:figures' \
            '*--stride[q=S0,S1,S2,S3\: steps in elements, in the layout'\''s order, 0 for expanded; also k…]:stride' \
            '*--misaligned[q,k,v,mask\: tensors that begin one element off a 16-byte boundary; q=4\: at 4 by…]:misaligned' \
            '*--env[JSON of doctor --json, of an earlier --json or of Environment; - reads standard…]:env:_files' \
            '*--from-log[a log or an error to explain; - reads standard input; flags state what it does …]:from-log:_files' \
            '*--model[a whole model\: its config.json, the folder with it, or a preset (llama-3-8b, ge…]:model' \
            '*--tp-size[with --model\: ranks that share its heads]:tp-size' \
            '*--image-size[with --model of a picture\: pixels on each side of it]:image-size' \
            '--ask-library[ask the real libcudnn too]' \
            '--sources[below each reason where it is written]' \
            '*--cudnn-lib[libcudnn, a file or folder; the environment'\''s if left out]:cudnn-lib' \
            '*--as[what this library would choose by itself, and why\: torch, te, transformers]:as' \
            '*--switch[with --as\: something of the library'\''s that is set, as NAME=VALUE, such as NVTE_…]:switch' \
            '*--gpus-per-node[with --cp-size\: GPUs that share the fast links]:gpus-per-node' \
            '*--link-gbs[with --cp-size\: GB/s per GPU and direction within a node]:link-gbs' \
            '*--network-gbs[with --cp-size\: GB/s per GPU and direction between nodes]:network-gbs' \
            '--measure[time every candidate that runs the call on this machine]' \
            '*--budget[with --measure\: seconds in all; 30 if left out]:budget' \
            '*--out[with --measure\: rows are appended to it; ~/.cache/attnsel/figures.csv if left o…]:out:_files' \
            '--short[one screen; of a log the verdicts]' \
            '--markdown[print Markdown, for an issue]' \
            '--json[print JSON instead of text]' \
            '*--html[also write the answer as a page with pictures, which needs no network; - prints…]:html:_files' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        can-i-use)
          case ${words[CURRENT]} in
            --params=*)
              compset -P '--params='
              _files
              return
              ;;
            --dtype=*)
              compset -P '--dtype='
              compadd -- 'bf16' 'fp16' 'fp32' 'fp64' 'fp8_e4m3' 'fp8_e5m2'
              return
              ;;
            --attn-mask-type=*)
              compset -P '--attn-mask-type='
              compadd -- 'no_mask' 'padding' 'causal' 'padding_causal' 'causal_bottom_right' 'padding_causal_bottom_right' 'arbitrary'
              return
              ;;
            --mask=*)
              compset -P '--mask='
              compadd -- 'no_mask' 'padding' 'causal' 'padding_causal' 'causal_bottom_right' 'padding_causal_bottom_right' 'arbitrary'
              return
              ;;
            --core-attention-bias-type=*)
              compset -P '--core-attention-bias-type='
              compadd -- 'no_bias' 'pre_scale_bias' 'post_scale_bias' 'alibi'
              return
              ;;
            --core-attention-bias-shape=*)
              compset -P '--core-attention-bias-shape='
              compadd -- 'bhss' '1hss' 'b1ss' '11ss' '111s'
              return
              ;;
            --softmax-type=*)
              compset -P '--softmax-type='
              compadd -- 'vanilla' 'off-by-one' 'learnable'
              return
              ;;
            --kv-cache=*)
              compset -P '--kv-cache='
              compadd -- 'none' 'contiguous' 'paged'
              return
              ;;
            --cp-comm-type=*)
              compset -P '--cp-comm-type='
              compadd -- 'p2p' 'all_gather' 'a2a' 'a2a+p2p'
              return
              ;;
            --fp8-recipe=*)
              compset -P '--fp8-recipe='
              compadd -- 'delayed' 'current' 'mxfp8' 'block'
              return
              ;;
            --gpu=*)
              compset -P '--gpu='
              compadd -- 'V100' 'V10016GB' 'V100PCIe' 'V100PCIe16GB' 'V100S' 'T4' 'T4G' 'A100' 'A10040GB' 'A100PCIe' 'A100PCIe40GB' 'A10064GB' 'A100X' 'A800' 'A800PCIe' 'A800PCIe40GB' 'A30' 'A30X' 'A2' 'A10' 'A10G' 'A16' 'A40' 'L2' 'L4' 'L20' 'L40' 'L40S' 'L40G' 'H100' 'H100PCIe' 'H100NVL' 'H10096GB' 'H10064GB' 'H800' 'H800PCIe' 'H20' 'H20141GB' 'H200' 'H200NVL' 'GH200' 'GH200144GB' 'B100' 'B200' 'GB200' 'B300' 'GB300' 'QuadroGV100' 'TITANV' 'TITANRTX' 'QuadroRTX3000' 'QuadroRTX4000' 'QuadroRTX4000Laptop' 'QuadroRTX5000' 'QuadroRTX6000' 'QuadroRTX8000' 'T400' 'T4004GB' 'T500Laptop' 'T550Laptop' 'T600' 'T600Laptop' 'T1000' 'T10008GB' 'T1200Laptop' 'QuadroT1000' 'QuadroT2000' 'RTXA400' 'RTXA500Laptop' 'RTXA1000' 'RTXA1000Laptop' 'RTXA1000Laptop6GB' 'RTXA2000' 'RTXA200012GB' 'RTXA2000Laptop' 'RTXA2000Laptop8GB' 'RTXA3000Laptop' 'RTXA3000Laptop12GB' 'RTXA4000' 'RTXA4000Laptop' 'RTXA4500' 'RTXA4500Laptop' 'RTXA5000' 'RTXA5000Laptop' 'RTXA5500' 'RTXA5500Laptop' 'RTXA6000' 'RTX500AdaLaptop' 'RTX1000AdaLaptop' 'RTX2000Ada' 'RTX2000AdaLaptop' 'RTX3000AdaLaptop' 'RTX3500AdaLaptop' 'RTX4000Ada' 'RTX4000SFFAda' 'RTX4000AdaLaptop' 'RTX4500Ada' 'RTX5000Ada' 'RTX5000AdaLaptop' 'RTX5880Ada' 'RTX6000Ada' 'RTXPRO500Laptop' 'RTXPRO1000Laptop' 'RTXPRO2000' 'RTXPRO2000Laptop' 'RTXPRO3000Laptop' 'RTXPRO4000' 'RTXPRO4000SFF' 'RTXPRO4000Laptop' 'RTXPRO4500' 'RTXPRO5000' 'RTXPRO500072GB' 'RTXPRO5000Laptop' 'RTXPRO6000' 'RTXPRO6000Max-Q' 'RTXPRO4500Server' 'RTXPRO6000Server' 'GB10' 'GTX1630' 'GTX1650' 'GTX1650Laptop' 'GTX1650TiLaptop' 'GTX1650SUPER' 'GTX1660' 'GTX1660SUPER' 'GTX1660Ti' 'MX450' 'MX550' 'RTX2060' 'RTX206012GB' 'RTX2060SUPER' 'RTX2070' 'RTX2070SUPER' 'RTX2080' 'RTX2080SUPER' 'RTX2080Ti' 'MX570' 'RTX2050Laptop' 'RTX3050' 'RTX30506GB' 'RTX3050Laptop' 'RTX3050Laptop6GB' 'RTX3050TiLaptop' 'RTX3060' 'RTX30608GB' 'RTX3060Laptop' 'RTX3060Ti' 'RTX3070' 'RTX3070Laptop' 'RTX3070Ti' 'RTX3070TiLaptop' 'RTX3080' 'RTX308012GB' 'RTX3080Laptop' 'RTX3080Laptop16GB' 'RTX3080Ti' 'RTX3080TiLaptop' 'RTX3090' 'RTX3090Ti' 'RTX4050Laptop' 'RTX4060' 'RTX4060Laptop' 'RTX4060Ti' 'RTX4060Ti16GB' 'RTX4070' 'RTX4070Laptop' 'RTX4070SUPER' 'RTX4070Ti' 'RTX4070TiSUPER' 'RTX4080' 'RTX4080Laptop' 'RTX4080SUPER' 'RTX4090' 'RTX4090D' 'RTX4090Laptop' 'RTX5050' 'RTX5050Laptop' 'RTX5060' 'RTX5060Laptop' 'RTX5060Ti' 'RTX5060Ti8GB' 'RTX5070' 'RTX5070Laptop' 'RTX5070Ti' 'RTX5070TiLaptop' 'RTX5080' 'RTX5080Laptop' 'RTX5090' 'RTX5090D' 'RTX5090DV2' 'RTX5090Laptop' 'Xavier' 'AGXXavier' 'AGXXavier64GB' 'AGXXavier16GB' 'XavierNX' 'XavierNX16GB' 'Orin' 'AGXOrin' 'AGXOrin32GB' 'OrinNX' 'OrinNX8GB' 'OrinNano' 'OrinNano4GB' 'Thor' 'JetsonT5000' 'JetsonT4000' 'A80040GB' 'AX800' 'A10M' 'H800NVL' 'T400E' 'RTXA4000H' 'RTXA500Embedded' 'RTXA1000Embedded' 'RTXA2000Embedded' 'RTXA4500Embedded' 'RTX2000EAda' 'RTX2000AdaEmbedded' 'RTX3500AdaEmbedded' 'RTX5000AdaEmbedded' 'RTX6000D' 'RTXPRO500Embedded' 'RTXPRO2000Embedded' 'RTXPRO4000Embedded' 'RTXPRO5000Embedded' 'MX570A' 'RTX3050OEM' 'RTX3050ALaptop' 'CMP100HX' 'CMP30HX' 'CMP40HX' 'CMP50HX' 'CMP170HX' 'CMP170HX10GB' 'CMP70HX' 'CMP90HX' 'P100' 'P100PCIe' 'P100PCIe12GB' 'P40' 'P4' 'P6' 'M60' 'M40' 'M10' 'QuadroGP100' 'QuadroP6000' 'QuadroP5000' 'QuadroP5200' 'QuadroP4200' 'QuadroP4000' 'QuadroP3200' 'QuadroP3000' 'QuadroP2200' 'QuadroP2000' 'QuadroP1000' 'QuadroP620' 'QuadroP600' 'QuadroP520' 'QuadroP500' 'QuadroP400' 'QuadroM6000' 'QuadroM600024GB' 'QuadroM5000' 'QuadroM5500' 'QuadroM4000' 'QuadroM2000' 'QuadroM2200' 'QuadroM5000M' 'QuadroM4000M' 'QuadroM3000M' 'QuadroK2200' 'QuadroK1200' 'QuadroK620' 'QuadroM1200' 'QuadroM620' 'QuadroM2000M' 'QuadroM1000M' 'QuadroM600M' 'QuadroM520' 'NVS810' 'TITANXp' 'TITANX' 'GTX1080Ti' 'GTX1080' 'GTX1070Ti' 'GTX1070' 'GTX1060' 'GTX10603GB' 'GTX10605GB' 'GTX1050Ti' 'GTX1050' 'GTX10503GB' 'GT1030' 'GTX1080Laptop' 'GTX1070Laptop' 'GTX1060Laptop' 'GTX1060Laptop3GB' 'GTX1050TiLaptop' 'GTX1050Laptop' 'GTX1050Laptop2GB' 'MX350' 'MX330' 'MX250' 'MX230' 'MX150' 'GTXTITANX' 'GTX980Ti' 'GTX980' 'GTX970' 'GTX960' 'GTX950' 'GTX980M' 'GTX970M' 'GTX965M' 'GTX750Ti' 'GTX750' 'GTX745' 'GTX960M' 'GTX950M' 'GTX850M' 'GTX860M' 'GeForce940MX' 'GeForce930MX' 'MX130' 'MX110' 'Rubin' 'K80' 'TeslaM4' 'TeslaM6' 'QuadroP5000Laptop' 'QuadroP4000Laptop' 'QuadroP2000Laptop' 'QuadroP1000Laptop' 'QuadroP620Laptop' 'QuadroP600Laptop' 'QuadroM3000SE' 'QuadroM500M' 'QuadroK2200M' 'QuadroK620M' '830M' 'GeForce840M' '845M' '920MX' '945M' '830A' '840A' 'GTX850A' '930A' '940A' '945A' 'GTX950A' 'GTX960A' 'GTX980MX' 'GTX980Laptop' 'GT1010' 'P102-100' 'P102-101' 'P104-100' 'P104-101' 'P106-100' 'P106-090' 'P106M' 'TITANVCEOEdition' 'T10' 'P10' 'PG500-216' 'PG503-216' 'PG506-207' 'PG506-217' 'PG506-242' 'RTX4010' 'MI355X' 'MI350X' 'MI325X' 'MI300X' 'MI300A' 'MI308X' 'MI250X' 'MI250' 'MI210' 'MI200' 'MI100' 'MI60' 'MI50' 'MI25' 'MI8' 'MI6' 'AIPROR9700S' 'AIPROR9700' 'AIPROR9600D' 'PROW7900' 'PROW7800' 'PROW780048GB' 'PROW7700' 'PROV710' 'PROW7600' 'PROW7500' 'PROW6800' 'PROV620' 'PROW6900X' 'PROW6800X' 'PROW6800XDuo' 'PROW6600' 'PROW6400' 'PROW6500M' 'PROW6300' 'PROW6600M' 'PROW6600X' 'PROW5700' 'PROW5700X' 'PROV520' 'PROW5500' 'PROVII' 'PROVegaII' 'PROVegaIIDuo' 'PROWX9100' 'PROWX8200' 'PROV340' 'VegaFrontierEdition' 'PROWX7100' 'PROWX5100' 'PROWX4100' 'RX9070XT' 'RX9070' 'RX9070GRE' 'RX9060XT' 'RX9060XT8GB' 'RX9060' 'RX7900XTX' 'RX7900XT' 'RX7900GRE' 'RX7900M' 'RX7800XT' 'RX7700XT' 'RX7700' 'RX7800M' 'RX7600XT' 'RX7600' 'RX7650GRE' 'RX7400' 'RX7700S' 'RX7600MXT' 'RX7600M' 'RX7600S' 'RX6950XT' 'RX6900XT' 'RX6800XT' 'RX6800' 'RX6750XT' 'RX6700XT' 'RX6700' 'RX6750GRE' 'RX6850MXT' 'RX6800M' 'RX6700M' 'RX6650XT' 'RX6600XT' 'RX6600' 'RX6600M' 'RX6650M' 'RX6650MXT' 'RX6800S' 'RX6700S' 'RX6600S' 'RX6500XT' 'RX6500XT8GB' 'RX6400' 'RX6500M' 'RX6300M' 'RX5700XT' 'RX5700' 'RX5600XT' 'RX5600' 'RX5600M' 'RX5700M' 'RX5500XT' 'RX5500' 'RX5500M' 'RX5300' 'RX5300M' 'RadeonVII' 'RXVega64' 'RXVega56' 'RX590' 'RX580' 'RX570' 'RX560' 'RX480' 'RX470' 'RX460' 'R9Nano' 'R9Fury' 'R9FuryX' '8060S' '8050S' '8040S' '8065S' '890M' '880M' '860M' '840M' '820M' '780M' '760M' '740M' '680M' '660M' '610M' 'SteamDeck' 'Vega8' 'Vega7' 'Vega6' 'RadeonGraphics' 'ArcProB70' 'ArcProB65' 'ArcProB60' 'ArcProB50' 'ArcB580' 'ArcB570' 'ArcA770' 'ArcA7708GB' 'ArcA750' 'ArcA580' 'ArcA380' 'ArcA310' 'ArcProA60' 'ArcProA60M' 'ArcProA50' 'ArcProA40' 'ArcProA30M' 'ArcA770M' 'ArcA730M' 'ArcA570M' 'ArcA550M' 'ArcA530M' 'ArcA370M' 'ArcA350M' 'ArcB390' 'ArcB370' 'Arc140V' 'Arc130V' 'Arc140T' 'Arc130T' 'ArcGraphics' 'IrisXe' 'UHD770' 'UHD750' 'UHD730' 'IrisPlus' 'UHD630' 'UHD620' 'UHDGraphics' 'IntelGraphics' 'DataCenterGPUMax1550' 'DataCenterGPUMax1450' 'DataCenterGPUMax1350' 'DataCenterGPUMax1100' 'DataCenterGPUMax' 'Flex170' 'Flex140' 'Flex' 'Arc' 'M1' 'M1Pro' 'M1Max' 'M1Ultra' 'M2' 'M2Pro' 'M2Max' 'M2Ultra' 'M3' 'M3Pro' 'M3Max' 'M3Ultra' 'M4' 'M4Pro' 'M4Max' 'M5' 'M5Pro' 'M5Max' 'M5Ultra' 'Applesilicon' 'JetsonTX2' 'JetsonTX2NX' 'JetsonNano' 'JetsonNano2GB' 'JetsonTX1' '710A' '710M' 'GT720M' 'GT730' 'GT710' 'GT730M' 'K20c' 'K20X' 'K20Xm' 'GT735M' 'GT740A' 'GTX780' 'GTX780Ti' 'GTXTITAN' 'QuadroK510M' 'QuadroK6000' 'QuadroK610M' 'K20m' 'K20' 'K40c' 'K40m' 'K40' '805A' '810A' '825M' 'GT720' 'GT730A' 'GTXTITANBlack' 'GTXTITANZ' 'QuadroK5200' '910M' '920A' '920M' 'JetsonTK1' 'GT640MLE' 'GeForce820M' '810M' 'GT640' 'GT640M' 'GT645M' 'GT650M' 'GTX650' 'GTX650Ti' 'GTX660' 'GTX660Ti' 'GTX660M' 'GTX670' 'GTX670MX' 'GTX675MX' 'GTX680' 'GTX680M' 'GTX690' 'NVS510' 'Quadro410' 'QuadroK1000M' 'QuadroK2000M' 'QuadroK3000M' 'QuadroK4000M' 'QuadroK5000' 'QuadroK5000M' 'QuadroK500M' 'K10' 'GT740M' 'GT745A' 'GT745M' 'GT750M' 'GT755M' 'GTX650TiBoost' 'GTX760' 'GTX760M' 'GTX765M' 'GTX770' 'GTX770M' 'GTX780M' 'K1' 'K100' 'K2' 'K200' 'K340' 'K520' 'QuadroK1100M' 'QuadroK2000' 'QuadroK2000D' 'QuadroK2100M' 'QuadroK3100M' 'QuadroK4000' 'QuadroK4100M' 'QuadroK5100M' 'QuadroK600' 'GT740' 'GTX760A' 'GTX870M' 'GTX880M' 'K500' 'QuadroK100M' 'QuadroK200M' 'QuadroK420' 'QuadroK4200' 'K8' 'GT415M' 'GT420M' 'GT425M' 'GT430' 'GT435M' 'GT445M' 'GTS450' 'GTX460' 'GTX460SE' 'GTX460M' 'GTX470M' 'Quadro2000' 'Quadro600' '410M' '610' 'GeForce610M' 'GT440' 'GT520' 'GT520M' 'GT520MX' 'GT525M' 'GT540M' 'GT545' 'GT550M' 'GT555M' 'GTX485M' 'GTX550Ti' 'GTX560' 'GTX560Ti' 'GTX560M' 'GTX570M' 'GTX580M' 'NVS4200M' 'Quadro1000M' 'Quadro2000D' 'Quadro2000M' 'Quadro3000M' 'Quadro4000M' 'Quadro500M' '620M' 'GT610' 'GT620' 'GT620M' 'GT625M' 'GT630' 'GT630M' 'GT635M' 'GTX560SE' 'GTX670M' 'GTX675M' 'NVS310' 'NVS5200M' 'NVS5400M' '705A' '705M' 'GT710M' 'NVS315' '720A' '800A' '800M' '820A' 'GT720A' 'GTX465' 'GTX470' 'GTX480' 'GTX480M' 'GTX570' 'GTX580' 'Quadro4000' 'Quadro5000M' 'Quadro6000' 'GTX560Ti448' 'GTX590' 'Quadro5000' 'Quadro5010M' 'C2050' 'C2070' 'C2075' 'M2050' 'M2070' 'M2075' 'M2090' 'Quadro7000' 'GT645' 'GTX645' 'GTX760Ti' 'GTX680MX' 'GTX775M' 'GT635' 'GT420' '510' 'GT530' 'GTX555' '605' '615' 'GT625' 'GT705' 'S2050' 'X2070' 'X2090' 'C2090' 'cpu' 'rocm' 'mps' 'xpu'
              return
              ;;
            --platform=*)
              compset -P '--platform='
              compadd -- 'linux' 'darwin' 'windows' 'other'
              return
              ;;
            --torch-flash=*)
              compset -P '--torch-flash='
              compadd -- 'FA2' 'FA3' 'FA4' 'other'
              return
              ;;
            --adapt=*)
              compset -P '--adapt='
              compadd -- 'auto' 'never'
              return
              ;;
            --env=*)
              compset -P '--env='
              _files
              return
              ;;
            --html=*)
              compset -P '--html='
              _files
              return
              ;;
          esac
          _arguments \
            '*:such as softcap, paged-kv, fp8 or head-dim-256; all if left out' \
            '*--params[JSON of AttentionParams, of an earlier --json, or what TransformerEngine prints…]:params:_files' \
            '*--head-dim[head dimension of queries, keys and values; 192,128 where those of values differ]:head-dim' \
            '*--seqlen[longest sequence, of queries and of keys]:seqlen' \
            '*--seq-len[longest sequence, of queries and of keys]:seq-len' \
            '*--causal[the mask type\: causal or no_mask; padding_causal or padding where sequences are…]:causal' \
            '--no-causal[the mask type\: causal or no_mask; padding_causal or padding where sequences are…]' \
            '*--sliding-window[as transformers has it\: a causal query sees N keys, its own among them, which i…]:sliding-window' \
            "*--dtype[element type of q, k and v\: bf16, fp16, fp32, fp64, fp8_e4m3, fp8_e5m2]:dtype:(bf16 fp16 fp32 fp64 fp8_e4m3 fp8_e5m2)" \
            '*--qkv-layout[memory layout, or just its format\: bshd, sbhd, thd, bhsd]:qkv-layout' \
            '*--layout[memory layout, or just its format\: bshd, sbhd, thd, bhsd]:layout' \
            '*--batch-size[sequences in the batch]:batch-size' \
            '*--batch[sequences in the batch]:batch' \
            '*--num-heads[query heads]:num-heads' \
            '*--heads[query heads]:heads' \
            '*--num-attention-heads[query heads]:num-attention-heads' \
            '*--num-gqa-groups[key/value heads; as many as query heads if 0]:num-gqa-groups' \
            '*--kv-heads[key/value heads; as many as query heads if 0]:kv-heads' \
            '*--num-kv-heads[key/value heads; as many as query heads if 0]:num-kv-heads' \
            '*--num-key-value-heads[key/value heads; as many as query heads if 0]:num-key-value-heads' \
            '*--max-seqlen-q[longest query sequence]:max-seqlen-q' \
            '*--seqlen-q[longest query sequence]:seqlen-q' \
            '*--max-seqlen-kv[longest key sequence; max_seqlen_q if -1]:max-seqlen-kv' \
            '*--seqlen-kv[longest key sequence; max_seqlen_q if -1]:seqlen-kv' \
            '*--head-dim-qk[head dimension of queries and keys]:head-dim-qk' \
            '*--head-dim-v[head dimension of values; head_dim_qk if 0]:head-dim-v' \
            "*--attn-mask-type[which pairs may attend\: no_mask, padding, causal, padding_causal, causal_bottom…]:attn-mask-type:(no_mask padding causal padding_causal causal_bottom_right padding_causal_bottom_right arbitrary)" \
            "*--mask[which pairs may attend\: no_mask, padding, causal, padding_causal, causal_bottom…]:mask:(no_mask padding causal padding_causal causal_bottom_right padding_causal_bottom_right arbitrary)" \
            '*--window-size[(left, right) keys around the diagonal, inclusive; -1 is no bound; one number i…]:window-size' \
            '--bottom-right-diagonal[anchor of windows and ALiBi; decided by a causal mask type]' \
            '--no-bottom-right-diagonal[anchor of windows and ALiBi; decided by a causal mask type]' \
            "*--core-attention-bias-type[what is added to the scores\: no_bias, pre_scale_bias, post_scale_bias, alibi]:core-attention-bias-type:(no_bias pre_scale_bias post_scale_bias alibi)" \
            "*--core-attention-bias-shape[which dimensions of the bias are not 1; 1hss if there is a bias\: bhss, 1hss, b1…]:core-attention-bias-shape:(bhss 1hss b1ss 11ss 111s)" \
            '--core-attention-bias-requires-grad[the bias needs a gradient]' \
            '--no-core-attention-bias-requires-grad[the bias needs a gradient]' \
            '*--alibi-slopes-shape[(h,) or (b, h) where slopes are given; computed from the heads if None]:alibi-slopes-shape' \
            "*--softmax-type[attention sink in the denominator\: vanilla, off-by-one, learnable]:softmax-type:(vanilla off-by-one learnable)" \
            '*--softcap[softcap * tanh(score / softcap); 0 is off]:softcap' \
            '*--attention-dropout[dropout probability]:attention-dropout' \
            '*--dropout[dropout probability]:dropout' \
            '--training[a backward pass will be needed]' \
            '--inference[a backward pass will be needed]' \
            '--deterministic[bitwise equal results run after run]' \
            '--no-deterministic[bitwise equal results run after run]' \
            '--return-lse[the log-sum-exp is needed too]' \
            '--no-return-lse[the log-sum-exp is needed too]' \
            '--return-max-logit[the largest score per head is needed too]' \
            '--no-return-max-logit[the largest score per head is needed too]' \
            "*--kv-cache[keys and values live in an inference cache\: none, contiguous, paged]:kv-cache:(none contiguous paged)" \
            '*--page-size[tokens per page of a paged cache]:page-size' \
            '--pad-between-seqs[thd\: gaps between packed sequences]' \
            '--no-pad-between-seqs[thd\: gaps between packed sequences]' \
            '*--cp-size[ranks that one sequence is spread over]:cp-size' \
            "*--cp-comm-type[how context parallel ranks exchange\: p2p, all_gather, a2a, a2a+p2p]:cp-comm-type:(p2p all_gather a2a a2a+p2p)" \
            '--cuda-graph[the call is captured into a CUDA graph]' \
            '--no-cuda-graph[the call is captured into a CUDA graph]' \
            '--fp8[inside FP8 autocast; the recipe says if attention is FP8]' \
            '--no-fp8[inside FP8 autocast; the recipe says if attention is FP8]' \
            '*--mask-dtype[for plain F.sdpa\: the element type of its attn_mask, such as fp32 or bool]:mask-dtype' \
            '*--tensor-rank[for plain F.sdpa\: dimensions of q, k and v; default 4]:tensor-rank' \
            "*--fp8-recipe[attention in FP8 under this recipe\: delayed, current, mxfp8, block]:fp8-recipe:(delayed current mxfp8 block)" \
            "*--gpu[H100, H200, B200, B300, RTX 5090, GB10 and more (attnsel gpus lists them), as d…]:gpu:(V100 V10016GB V100PCIe V100PCIe16GB V100S T4 T4G A100 A10040GB A100PCIe A100PCIe40GB A10064GB A100X A800 A800PCIe A800PCIe40GB A30 A30X A2 A10 A10G A16 A40 L2 L4 L20 L40 L40S L40G H100 H100PCIe H100NVL H10096GB H10064GB H800 H800PCIe H20 H20141GB H200 H200NVL GH200 GH200144GB B100 B200 GB200 B300 GB300 QuadroGV100 TITANV TITANRTX QuadroRTX3000 QuadroRTX4000 QuadroRTX4000Laptop QuadroRTX5000 QuadroRTX6000 QuadroRTX8000 T400 T4004GB T500Laptop T550Laptop T600 T600Laptop T1000 T10008GB T1200Laptop QuadroT1000 QuadroT2000 RTXA400 RTXA500Laptop RTXA1000 RTXA1000Laptop RTXA1000Laptop6GB RTXA2000 RTXA200012GB RTXA2000Laptop RTXA2000Laptop8GB RTXA3000Laptop RTXA3000Laptop12GB RTXA4000 RTXA4000Laptop RTXA4500 RTXA4500Laptop RTXA5000 RTXA5000Laptop RTXA5500 RTXA5500Laptop RTXA6000 RTX500AdaLaptop RTX1000AdaLaptop RTX2000Ada RTX2000AdaLaptop RTX3000AdaLaptop RTX3500AdaLaptop RTX4000Ada RTX4000SFFAda RTX4000AdaLaptop RTX4500Ada RTX5000Ada RTX5000AdaLaptop RTX5880Ada RTX6000Ada RTXPRO500Laptop RTXPRO1000Laptop RTXPRO2000 RTXPRO2000Laptop RTXPRO3000Laptop RTXPRO4000 RTXPRO4000SFF RTXPRO4000Laptop RTXPRO4500 RTXPRO5000 RTXPRO500072GB RTXPRO5000Laptop RTXPRO6000 RTXPRO6000Max-Q RTXPRO4500Server RTXPRO6000Server GB10 GTX1630 GTX1650 GTX1650Laptop GTX1650TiLaptop GTX1650SUPER GTX1660 GTX1660SUPER GTX1660Ti MX450 MX550 RTX2060 RTX206012GB RTX2060SUPER RTX2070 RTX2070SUPER RTX2080 RTX2080SUPER RTX2080Ti MX570 RTX2050Laptop RTX3050 RTX30506GB RTX3050Laptop RTX3050Laptop6GB RTX3050TiLaptop RTX3060 RTX30608GB RTX3060Laptop RTX3060Ti RTX3070 RTX3070Laptop RTX3070Ti RTX3070TiLaptop RTX3080 RTX308012GB RTX3080Laptop RTX3080Laptop16GB RTX3080Ti RTX3080TiLaptop RTX3090 RTX3090Ti RTX4050Laptop RTX4060 RTX4060Laptop RTX4060Ti RTX4060Ti16GB RTX4070 RTX4070Laptop RTX4070SUPER RTX4070Ti RTX4070TiSUPER RTX4080 RTX4080Laptop RTX4080SUPER RTX4090 RTX4090D RTX4090Laptop RTX5050 RTX5050Laptop RTX5060 RTX5060Laptop RTX5060Ti RTX5060Ti8GB RTX5070 RTX5070Laptop RTX5070Ti RTX5070TiLaptop RTX5080 RTX5080Laptop RTX5090 RTX5090D RTX5090DV2 RTX5090Laptop Xavier AGXXavier AGXXavier64GB AGXXavier16GB XavierNX XavierNX16GB Orin AGXOrin AGXOrin32GB OrinNX OrinNX8GB OrinNano OrinNano4GB Thor JetsonT5000 JetsonT4000 A80040GB AX800 A10M H800NVL T400E RTXA4000H RTXA500Embedded RTXA1000Embedded RTXA2000Embedded RTXA4500Embedded RTX2000EAda RTX2000AdaEmbedded RTX3500AdaEmbedded RTX5000AdaEmbedded RTX6000D RTXPRO500Embedded RTXPRO2000Embedded RTXPRO4000Embedded RTXPRO5000Embedded MX570A RTX3050OEM RTX3050ALaptop CMP100HX CMP30HX CMP40HX CMP50HX CMP170HX CMP170HX10GB CMP70HX CMP90HX P100 P100PCIe P100PCIe12GB P40 P4 P6 M60 M40 M10 QuadroGP100 QuadroP6000 QuadroP5000 QuadroP5200 QuadroP4200 QuadroP4000 QuadroP3200 QuadroP3000 QuadroP2200 QuadroP2000 QuadroP1000 QuadroP620 QuadroP600 QuadroP520 QuadroP500 QuadroP400 QuadroM6000 QuadroM600024GB QuadroM5000 QuadroM5500 QuadroM4000 QuadroM2000 QuadroM2200 QuadroM5000M QuadroM4000M QuadroM3000M QuadroK2200 QuadroK1200 QuadroK620 QuadroM1200 QuadroM620 QuadroM2000M QuadroM1000M QuadroM600M QuadroM520 NVS810 TITANXp TITANX GTX1080Ti GTX1080 GTX1070Ti GTX1070 GTX1060 GTX10603GB GTX10605GB GTX1050Ti GTX1050 GTX10503GB GT1030 GTX1080Laptop GTX1070Laptop GTX1060Laptop GTX1060Laptop3GB GTX1050TiLaptop GTX1050Laptop GTX1050Laptop2GB MX350 MX330 MX250 MX230 MX150 GTXTITANX GTX980Ti GTX980 GTX970 GTX960 GTX950 GTX980M GTX970M GTX965M GTX750Ti GTX750 GTX745 GTX960M GTX950M GTX850M GTX860M GeForce940MX GeForce930MX MX130 MX110 Rubin K80 TeslaM4 TeslaM6 QuadroP5000Laptop QuadroP4000Laptop QuadroP2000Laptop QuadroP1000Laptop QuadroP620Laptop QuadroP600Laptop QuadroM3000SE QuadroM500M QuadroK2200M QuadroK620M 830M GeForce840M 845M 920MX 945M 830A 840A GTX850A 930A 940A 945A GTX950A GTX960A GTX980MX GTX980Laptop GT1010 P102-100 P102-101 P104-100 P104-101 P106-100 P106-090 P106M TITANVCEOEdition T10 P10 PG500-216 PG503-216 PG506-207 PG506-217 PG506-242 RTX4010 MI355X MI350X MI325X MI300X MI300A MI308X MI250X MI250 MI210 MI200 MI100 MI60 MI50 MI25 MI8 MI6 AIPROR9700S AIPROR9700 AIPROR9600D PROW7900 PROW7800 PROW780048GB PROW7700 PROV710 PROW7600 PROW7500 PROW6800 PROV620 PROW6900X PROW6800X PROW6800XDuo PROW6600 PROW6400 PROW6500M PROW6300 PROW6600M PROW6600X PROW5700 PROW5700X PROV520 PROW5500 PROVII PROVegaII PROVegaIIDuo PROWX9100 PROWX8200 PROV340 VegaFrontierEdition PROWX7100 PROWX5100 PROWX4100 RX9070XT RX9070 RX9070GRE RX9060XT RX9060XT8GB RX9060 RX7900XTX RX7900XT RX7900GRE RX7900M RX7800XT RX7700XT RX7700 RX7800M RX7600XT RX7600 RX7650GRE RX7400 RX7700S RX7600MXT RX7600M RX7600S RX6950XT RX6900XT RX6800XT RX6800 RX6750XT RX6700XT RX6700 RX6750GRE RX6850MXT RX6800M RX6700M RX6650XT RX6600XT RX6600 RX6600M RX6650M RX6650MXT RX6800S RX6700S RX6600S RX6500XT RX6500XT8GB RX6400 RX6500M RX6300M RX5700XT RX5700 RX5600XT RX5600 RX5600M RX5700M RX5500XT RX5500 RX5500M RX5300 RX5300M RadeonVII RXVega64 RXVega56 RX590 RX580 RX570 RX560 RX480 RX470 RX460 R9Nano R9Fury R9FuryX 8060S 8050S 8040S 8065S 890M 880M 860M 840M 820M 780M 760M 740M 680M 660M 610M SteamDeck Vega8 Vega7 Vega6 RadeonGraphics ArcProB70 ArcProB65 ArcProB60 ArcProB50 ArcB580 ArcB570 ArcA770 ArcA7708GB ArcA750 ArcA580 ArcA380 ArcA310 ArcProA60 ArcProA60M ArcProA50 ArcProA40 ArcProA30M ArcA770M ArcA730M ArcA570M ArcA550M ArcA530M ArcA370M ArcA350M ArcB390 ArcB370 Arc140V Arc130V Arc140T Arc130T ArcGraphics IrisXe UHD770 UHD750 UHD730 IrisPlus UHD630 UHD620 UHDGraphics IntelGraphics DataCenterGPUMax1550 DataCenterGPUMax1450 DataCenterGPUMax1350 DataCenterGPUMax1100 DataCenterGPUMax Flex170 Flex140 Flex Arc M1 M1Pro M1Max M1Ultra M2 M2Pro M2Max M2Ultra M3 M3Pro M3Max M3Ultra M4 M4Pro M4Max M5 M5Pro M5Max M5Ultra Applesilicon JetsonTX2 JetsonTX2NX JetsonNano JetsonNano2GB JetsonTX1 710A 710M GT720M GT730 GT710 GT730M K20c K20X K20Xm GT735M GT740A GTX780 GTX780Ti GTXTITAN QuadroK510M QuadroK6000 QuadroK610M K20m K20 K40c K40m K40 805A 810A 825M GT720 GT730A GTXTITANBlack GTXTITANZ QuadroK5200 910M 920A 920M JetsonTK1 GT640MLE GeForce820M 810M GT640 GT640M GT645M GT650M GTX650 GTX650Ti GTX660 GTX660Ti GTX660M GTX670 GTX670MX GTX675MX GTX680 GTX680M GTX690 NVS510 Quadro410 QuadroK1000M QuadroK2000M QuadroK3000M QuadroK4000M QuadroK5000 QuadroK5000M QuadroK500M K10 GT740M GT745A GT745M GT750M GT755M GTX650TiBoost GTX760 GTX760M GTX765M GTX770 GTX770M GTX780M K1 K100 K2 K200 K340 K520 QuadroK1100M QuadroK2000 QuadroK2000D QuadroK2100M QuadroK3100M QuadroK4000 QuadroK4100M QuadroK5100M QuadroK600 GT740 GTX760A GTX870M GTX880M K500 QuadroK100M QuadroK200M QuadroK420 QuadroK4200 K8 GT415M GT420M GT425M GT430 GT435M GT445M GTS450 GTX460 GTX460SE GTX460M GTX470M Quadro2000 Quadro600 410M 610 GeForce610M GT440 GT520 GT520M GT520MX GT525M GT540M GT545 GT550M GT555M GTX485M GTX550Ti GTX560 GTX560Ti GTX560M GTX570M GTX580M NVS4200M Quadro1000M Quadro2000D Quadro2000M Quadro3000M Quadro4000M Quadro500M 620M GT610 GT620 GT620M GT625M GT630 GT630M GT635M GTX560SE GTX670M GTX675M NVS310 NVS5200M NVS5400M 705A 705M GT710M NVS315 720A 800A 800M 820A GT720A GTX465 GTX470 GTX480 GTX480M GTX570 GTX580 Quadro4000 Quadro5000M Quadro6000 GTX560Ti448 GTX590 Quadro5000 Quadro5010M C2050 C2070 C2075 M2050 M2070 M2075 M2090 Quadro7000 GT645 GTX645 GTX760Ti GTX680MX GTX775M GT635 GT420 510 GT530 GTX555 605 615 GT625 GT705 S2050 X2070 X2090 C2090 cpu rocm mps xpu)" \
            '*--torch[version of torch, or none where it is not installed]:torch' \
            '*--triton[version of triton, or none where it is not installed]:triton' \
            '*--cudnn[version of cudnn, or none where it is not installed]:cudnn' \
            '*--cudnn-frontend[version of cudnn-frontend, or none where it is not installed]:cudnn-frontend' \
            '*--cuda[version of cuda, or none where it is not installed]:cuda' \
            '*--python[version of python, or none where it is not installed]:python' \
            '*--flash-attn[version of flash-attn, or none where it is not installed]:flash-attn' \
            '*--flash-attn-3[version of flash-attn-3, or none where it is not installed]:flash-attn-3' \
            '*--flash-attn-4[version of flash-attn-4, or none where it is not installed]:flash-attn-4' \
            '*--transformer-engine[version of transformer-engine, or none where it is not installed]:transformer-engine' \
            "*--platform[linux, darwin, windows, other]:platform:(linux darwin windows other)" \
            "*--torch-flash[what answers torch's own flash attention\: activate_flash_attention_impl\: FA2, F…]:torch-flash:(FA2 FA3 FA4 other)" \
            '*--missing[libraries that are not there, or do not load\: libnvrtc, libcudnn]:missing' \
            '*--backend[run this candidate or raise with its reasons; never another]:backend' \
            '*--allow[only these candidates, in this order of preference; commas between]:allow' \
            '*--deny[never these candidates; commas between]:deny' \
            "*--adapt[whether a call may be changed exactly (a mask folded, a copy made)\: auto, never]:adapt:(auto never)" \
            '*--allow-known-bugs[BUG codes to ignore, for those who know their build is patched; commas between]:allow-known-bugs' \
            '--preview[let rules refuse that are still tried out]' \
            '--no-preview[let rules refuse that are still tried out]' \
            '*--memory-limit[most memory, such as 2GiB, that a call may take for scores, masks, copies and t…]:memory-limit' \
            '*--figures[a file of explain --measure\: what was measured here goes before what was publis…]:figures' \
            '*--stride[q=S0,S1,S2,S3\: steps in elements, in the layout'\''s order, 0 for expanded; also k…]:stride' \
            '*--misaligned[q,k,v,mask\: tensors that begin one element off a 16-byte boundary; q=4\: at 4 by…]:misaligned' \
            '*--env[JSON of doctor --json, of an earlier --json or of Environment; - reads standard…]:env:_files' \
            '*--rows[FIELD=VALUES down the side]:rows' \
            '*--cols[FIELD=VALUES along the top]:cols' \
            '*--kernel[only these kernels; commas between. Of a grid\: one, instead of which one is cho…]:kernel' \
            '*--as[what this library would choose by itself, and why\: torch, te, transformers]:as' \
            '*--switch[with --as\: something of the library'\''s that is set, as NAME=VALUE, such as NVTE_…]:switch' \
            '--csv[print a grid as CSV]' \
            '--markdown[print Markdown, for an issue]' \
            '--json[print JSON instead of text]' \
            '*--html[also write the answer as a page with pictures, which needs no network; - prints…]:html:_files' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        compare)
          case ${words[CURRENT]} in
            --params=*)
              compset -P '--params='
              _files
              return
              ;;
            --dtype=*)
              compset -P '--dtype='
              compadd -- 'bf16' 'fp16' 'fp32' 'fp64' 'fp8_e4m3' 'fp8_e5m2'
              return
              ;;
            --attn-mask-type=*)
              compset -P '--attn-mask-type='
              compadd -- 'no_mask' 'padding' 'causal' 'padding_causal' 'causal_bottom_right' 'padding_causal_bottom_right' 'arbitrary'
              return
              ;;
            --mask=*)
              compset -P '--mask='
              compadd -- 'no_mask' 'padding' 'causal' 'padding_causal' 'causal_bottom_right' 'padding_causal_bottom_right' 'arbitrary'
              return
              ;;
            --core-attention-bias-type=*)
              compset -P '--core-attention-bias-type='
              compadd -- 'no_bias' 'pre_scale_bias' 'post_scale_bias' 'alibi'
              return
              ;;
            --core-attention-bias-shape=*)
              compset -P '--core-attention-bias-shape='
              compadd -- 'bhss' '1hss' 'b1ss' '11ss' '111s'
              return
              ;;
            --softmax-type=*)
              compset -P '--softmax-type='
              compadd -- 'vanilla' 'off-by-one' 'learnable'
              return
              ;;
            --kv-cache=*)
              compset -P '--kv-cache='
              compadd -- 'none' 'contiguous' 'paged'
              return
              ;;
            --cp-comm-type=*)
              compset -P '--cp-comm-type='
              compadd -- 'p2p' 'all_gather' 'a2a' 'a2a+p2p'
              return
              ;;
            --fp8-recipe=*)
              compset -P '--fp8-recipe='
              compadd -- 'delayed' 'current' 'mxfp8' 'block'
              return
              ;;
            --gpu=*)
              compset -P '--gpu='
              compadd -- 'V100' 'V10016GB' 'V100PCIe' 'V100PCIe16GB' 'V100S' 'T4' 'T4G' 'A100' 'A10040GB' 'A100PCIe' 'A100PCIe40GB' 'A10064GB' 'A100X' 'A800' 'A800PCIe' 'A800PCIe40GB' 'A30' 'A30X' 'A2' 'A10' 'A10G' 'A16' 'A40' 'L2' 'L4' 'L20' 'L40' 'L40S' 'L40G' 'H100' 'H100PCIe' 'H100NVL' 'H10096GB' 'H10064GB' 'H800' 'H800PCIe' 'H20' 'H20141GB' 'H200' 'H200NVL' 'GH200' 'GH200144GB' 'B100' 'B200' 'GB200' 'B300' 'GB300' 'QuadroGV100' 'TITANV' 'TITANRTX' 'QuadroRTX3000' 'QuadroRTX4000' 'QuadroRTX4000Laptop' 'QuadroRTX5000' 'QuadroRTX6000' 'QuadroRTX8000' 'T400' 'T4004GB' 'T500Laptop' 'T550Laptop' 'T600' 'T600Laptop' 'T1000' 'T10008GB' 'T1200Laptop' 'QuadroT1000' 'QuadroT2000' 'RTXA400' 'RTXA500Laptop' 'RTXA1000' 'RTXA1000Laptop' 'RTXA1000Laptop6GB' 'RTXA2000' 'RTXA200012GB' 'RTXA2000Laptop' 'RTXA2000Laptop8GB' 'RTXA3000Laptop' 'RTXA3000Laptop12GB' 'RTXA4000' 'RTXA4000Laptop' 'RTXA4500' 'RTXA4500Laptop' 'RTXA5000' 'RTXA5000Laptop' 'RTXA5500' 'RTXA5500Laptop' 'RTXA6000' 'RTX500AdaLaptop' 'RTX1000AdaLaptop' 'RTX2000Ada' 'RTX2000AdaLaptop' 'RTX3000AdaLaptop' 'RTX3500AdaLaptop' 'RTX4000Ada' 'RTX4000SFFAda' 'RTX4000AdaLaptop' 'RTX4500Ada' 'RTX5000Ada' 'RTX5000AdaLaptop' 'RTX5880Ada' 'RTX6000Ada' 'RTXPRO500Laptop' 'RTXPRO1000Laptop' 'RTXPRO2000' 'RTXPRO2000Laptop' 'RTXPRO3000Laptop' 'RTXPRO4000' 'RTXPRO4000SFF' 'RTXPRO4000Laptop' 'RTXPRO4500' 'RTXPRO5000' 'RTXPRO500072GB' 'RTXPRO5000Laptop' 'RTXPRO6000' 'RTXPRO6000Max-Q' 'RTXPRO4500Server' 'RTXPRO6000Server' 'GB10' 'GTX1630' 'GTX1650' 'GTX1650Laptop' 'GTX1650TiLaptop' 'GTX1650SUPER' 'GTX1660' 'GTX1660SUPER' 'GTX1660Ti' 'MX450' 'MX550' 'RTX2060' 'RTX206012GB' 'RTX2060SUPER' 'RTX2070' 'RTX2070SUPER' 'RTX2080' 'RTX2080SUPER' 'RTX2080Ti' 'MX570' 'RTX2050Laptop' 'RTX3050' 'RTX30506GB' 'RTX3050Laptop' 'RTX3050Laptop6GB' 'RTX3050TiLaptop' 'RTX3060' 'RTX30608GB' 'RTX3060Laptop' 'RTX3060Ti' 'RTX3070' 'RTX3070Laptop' 'RTX3070Ti' 'RTX3070TiLaptop' 'RTX3080' 'RTX308012GB' 'RTX3080Laptop' 'RTX3080Laptop16GB' 'RTX3080Ti' 'RTX3080TiLaptop' 'RTX3090' 'RTX3090Ti' 'RTX4050Laptop' 'RTX4060' 'RTX4060Laptop' 'RTX4060Ti' 'RTX4060Ti16GB' 'RTX4070' 'RTX4070Laptop' 'RTX4070SUPER' 'RTX4070Ti' 'RTX4070TiSUPER' 'RTX4080' 'RTX4080Laptop' 'RTX4080SUPER' 'RTX4090' 'RTX4090D' 'RTX4090Laptop' 'RTX5050' 'RTX5050Laptop' 'RTX5060' 'RTX5060Laptop' 'RTX5060Ti' 'RTX5060Ti8GB' 'RTX5070' 'RTX5070Laptop' 'RTX5070Ti' 'RTX5070TiLaptop' 'RTX5080' 'RTX5080Laptop' 'RTX5090' 'RTX5090D' 'RTX5090DV2' 'RTX5090Laptop' 'Xavier' 'AGXXavier' 'AGXXavier64GB' 'AGXXavier16GB' 'XavierNX' 'XavierNX16GB' 'Orin' 'AGXOrin' 'AGXOrin32GB' 'OrinNX' 'OrinNX8GB' 'OrinNano' 'OrinNano4GB' 'Thor' 'JetsonT5000' 'JetsonT4000' 'A80040GB' 'AX800' 'A10M' 'H800NVL' 'T400E' 'RTXA4000H' 'RTXA500Embedded' 'RTXA1000Embedded' 'RTXA2000Embedded' 'RTXA4500Embedded' 'RTX2000EAda' 'RTX2000AdaEmbedded' 'RTX3500AdaEmbedded' 'RTX5000AdaEmbedded' 'RTX6000D' 'RTXPRO500Embedded' 'RTXPRO2000Embedded' 'RTXPRO4000Embedded' 'RTXPRO5000Embedded' 'MX570A' 'RTX3050OEM' 'RTX3050ALaptop' 'CMP100HX' 'CMP30HX' 'CMP40HX' 'CMP50HX' 'CMP170HX' 'CMP170HX10GB' 'CMP70HX' 'CMP90HX' 'P100' 'P100PCIe' 'P100PCIe12GB' 'P40' 'P4' 'P6' 'M60' 'M40' 'M10' 'QuadroGP100' 'QuadroP6000' 'QuadroP5000' 'QuadroP5200' 'QuadroP4200' 'QuadroP4000' 'QuadroP3200' 'QuadroP3000' 'QuadroP2200' 'QuadroP2000' 'QuadroP1000' 'QuadroP620' 'QuadroP600' 'QuadroP520' 'QuadroP500' 'QuadroP400' 'QuadroM6000' 'QuadroM600024GB' 'QuadroM5000' 'QuadroM5500' 'QuadroM4000' 'QuadroM2000' 'QuadroM2200' 'QuadroM5000M' 'QuadroM4000M' 'QuadroM3000M' 'QuadroK2200' 'QuadroK1200' 'QuadroK620' 'QuadroM1200' 'QuadroM620' 'QuadroM2000M' 'QuadroM1000M' 'QuadroM600M' 'QuadroM520' 'NVS810' 'TITANXp' 'TITANX' 'GTX1080Ti' 'GTX1080' 'GTX1070Ti' 'GTX1070' 'GTX1060' 'GTX10603GB' 'GTX10605GB' 'GTX1050Ti' 'GTX1050' 'GTX10503GB' 'GT1030' 'GTX1080Laptop' 'GTX1070Laptop' 'GTX1060Laptop' 'GTX1060Laptop3GB' 'GTX1050TiLaptop' 'GTX1050Laptop' 'GTX1050Laptop2GB' 'MX350' 'MX330' 'MX250' 'MX230' 'MX150' 'GTXTITANX' 'GTX980Ti' 'GTX980' 'GTX970' 'GTX960' 'GTX950' 'GTX980M' 'GTX970M' 'GTX965M' 'GTX750Ti' 'GTX750' 'GTX745' 'GTX960M' 'GTX950M' 'GTX850M' 'GTX860M' 'GeForce940MX' 'GeForce930MX' 'MX130' 'MX110' 'Rubin' 'K80' 'TeslaM4' 'TeslaM6' 'QuadroP5000Laptop' 'QuadroP4000Laptop' 'QuadroP2000Laptop' 'QuadroP1000Laptop' 'QuadroP620Laptop' 'QuadroP600Laptop' 'QuadroM3000SE' 'QuadroM500M' 'QuadroK2200M' 'QuadroK620M' '830M' 'GeForce840M' '845M' '920MX' '945M' '830A' '840A' 'GTX850A' '930A' '940A' '945A' 'GTX950A' 'GTX960A' 'GTX980MX' 'GTX980Laptop' 'GT1010' 'P102-100' 'P102-101' 'P104-100' 'P104-101' 'P106-100' 'P106-090' 'P106M' 'TITANVCEOEdition' 'T10' 'P10' 'PG500-216' 'PG503-216' 'PG506-207' 'PG506-217' 'PG506-242' 'RTX4010' 'MI355X' 'MI350X' 'MI325X' 'MI300X' 'MI300A' 'MI308X' 'MI250X' 'MI250' 'MI210' 'MI200' 'MI100' 'MI60' 'MI50' 'MI25' 'MI8' 'MI6' 'AIPROR9700S' 'AIPROR9700' 'AIPROR9600D' 'PROW7900' 'PROW7800' 'PROW780048GB' 'PROW7700' 'PROV710' 'PROW7600' 'PROW7500' 'PROW6800' 'PROV620' 'PROW6900X' 'PROW6800X' 'PROW6800XDuo' 'PROW6600' 'PROW6400' 'PROW6500M' 'PROW6300' 'PROW6600M' 'PROW6600X' 'PROW5700' 'PROW5700X' 'PROV520' 'PROW5500' 'PROVII' 'PROVegaII' 'PROVegaIIDuo' 'PROWX9100' 'PROWX8200' 'PROV340' 'VegaFrontierEdition' 'PROWX7100' 'PROWX5100' 'PROWX4100' 'RX9070XT' 'RX9070' 'RX9070GRE' 'RX9060XT' 'RX9060XT8GB' 'RX9060' 'RX7900XTX' 'RX7900XT' 'RX7900GRE' 'RX7900M' 'RX7800XT' 'RX7700XT' 'RX7700' 'RX7800M' 'RX7600XT' 'RX7600' 'RX7650GRE' 'RX7400' 'RX7700S' 'RX7600MXT' 'RX7600M' 'RX7600S' 'RX6950XT' 'RX6900XT' 'RX6800XT' 'RX6800' 'RX6750XT' 'RX6700XT' 'RX6700' 'RX6750GRE' 'RX6850MXT' 'RX6800M' 'RX6700M' 'RX6650XT' 'RX6600XT' 'RX6600' 'RX6600M' 'RX6650M' 'RX6650MXT' 'RX6800S' 'RX6700S' 'RX6600S' 'RX6500XT' 'RX6500XT8GB' 'RX6400' 'RX6500M' 'RX6300M' 'RX5700XT' 'RX5700' 'RX5600XT' 'RX5600' 'RX5600M' 'RX5700M' 'RX5500XT' 'RX5500' 'RX5500M' 'RX5300' 'RX5300M' 'RadeonVII' 'RXVega64' 'RXVega56' 'RX590' 'RX580' 'RX570' 'RX560' 'RX480' 'RX470' 'RX460' 'R9Nano' 'R9Fury' 'R9FuryX' '8060S' '8050S' '8040S' '8065S' '890M' '880M' '860M' '840M' '820M' '780M' '760M' '740M' '680M' '660M' '610M' 'SteamDeck' 'Vega8' 'Vega7' 'Vega6' 'RadeonGraphics' 'ArcProB70' 'ArcProB65' 'ArcProB60' 'ArcProB50' 'ArcB580' 'ArcB570' 'ArcA770' 'ArcA7708GB' 'ArcA750' 'ArcA580' 'ArcA380' 'ArcA310' 'ArcProA60' 'ArcProA60M' 'ArcProA50' 'ArcProA40' 'ArcProA30M' 'ArcA770M' 'ArcA730M' 'ArcA570M' 'ArcA550M' 'ArcA530M' 'ArcA370M' 'ArcA350M' 'ArcB390' 'ArcB370' 'Arc140V' 'Arc130V' 'Arc140T' 'Arc130T' 'ArcGraphics' 'IrisXe' 'UHD770' 'UHD750' 'UHD730' 'IrisPlus' 'UHD630' 'UHD620' 'UHDGraphics' 'IntelGraphics' 'DataCenterGPUMax1550' 'DataCenterGPUMax1450' 'DataCenterGPUMax1350' 'DataCenterGPUMax1100' 'DataCenterGPUMax' 'Flex170' 'Flex140' 'Flex' 'Arc' 'M1' 'M1Pro' 'M1Max' 'M1Ultra' 'M2' 'M2Pro' 'M2Max' 'M2Ultra' 'M3' 'M3Pro' 'M3Max' 'M3Ultra' 'M4' 'M4Pro' 'M4Max' 'M5' 'M5Pro' 'M5Max' 'M5Ultra' 'Applesilicon' 'JetsonTX2' 'JetsonTX2NX' 'JetsonNano' 'JetsonNano2GB' 'JetsonTX1' '710A' '710M' 'GT720M' 'GT730' 'GT710' 'GT730M' 'K20c' 'K20X' 'K20Xm' 'GT735M' 'GT740A' 'GTX780' 'GTX780Ti' 'GTXTITAN' 'QuadroK510M' 'QuadroK6000' 'QuadroK610M' 'K20m' 'K20' 'K40c' 'K40m' 'K40' '805A' '810A' '825M' 'GT720' 'GT730A' 'GTXTITANBlack' 'GTXTITANZ' 'QuadroK5200' '910M' '920A' '920M' 'JetsonTK1' 'GT640MLE' 'GeForce820M' '810M' 'GT640' 'GT640M' 'GT645M' 'GT650M' 'GTX650' 'GTX650Ti' 'GTX660' 'GTX660Ti' 'GTX660M' 'GTX670' 'GTX670MX' 'GTX675MX' 'GTX680' 'GTX680M' 'GTX690' 'NVS510' 'Quadro410' 'QuadroK1000M' 'QuadroK2000M' 'QuadroK3000M' 'QuadroK4000M' 'QuadroK5000' 'QuadroK5000M' 'QuadroK500M' 'K10' 'GT740M' 'GT745A' 'GT745M' 'GT750M' 'GT755M' 'GTX650TiBoost' 'GTX760' 'GTX760M' 'GTX765M' 'GTX770' 'GTX770M' 'GTX780M' 'K1' 'K100' 'K2' 'K200' 'K340' 'K520' 'QuadroK1100M' 'QuadroK2000' 'QuadroK2000D' 'QuadroK2100M' 'QuadroK3100M' 'QuadroK4000' 'QuadroK4100M' 'QuadroK5100M' 'QuadroK600' 'GT740' 'GTX760A' 'GTX870M' 'GTX880M' 'K500' 'QuadroK100M' 'QuadroK200M' 'QuadroK420' 'QuadroK4200' 'K8' 'GT415M' 'GT420M' 'GT425M' 'GT430' 'GT435M' 'GT445M' 'GTS450' 'GTX460' 'GTX460SE' 'GTX460M' 'GTX470M' 'Quadro2000' 'Quadro600' '410M' '610' 'GeForce610M' 'GT440' 'GT520' 'GT520M' 'GT520MX' 'GT525M' 'GT540M' 'GT545' 'GT550M' 'GT555M' 'GTX485M' 'GTX550Ti' 'GTX560' 'GTX560Ti' 'GTX560M' 'GTX570M' 'GTX580M' 'NVS4200M' 'Quadro1000M' 'Quadro2000D' 'Quadro2000M' 'Quadro3000M' 'Quadro4000M' 'Quadro500M' '620M' 'GT610' 'GT620' 'GT620M' 'GT625M' 'GT630' 'GT630M' 'GT635M' 'GTX560SE' 'GTX670M' 'GTX675M' 'NVS310' 'NVS5200M' 'NVS5400M' '705A' '705M' 'GT710M' 'NVS315' '720A' '800A' '800M' '820A' 'GT720A' 'GTX465' 'GTX470' 'GTX480' 'GTX480M' 'GTX570' 'GTX580' 'Quadro4000' 'Quadro5000M' 'Quadro6000' 'GTX560Ti448' 'GTX590' 'Quadro5000' 'Quadro5010M' 'C2050' 'C2070' 'C2075' 'M2050' 'M2070' 'M2075' 'M2090' 'Quadro7000' 'GT645' 'GTX645' 'GTX760Ti' 'GTX680MX' 'GTX775M' 'GT635' 'GT420' '510' 'GT530' 'GTX555' '605' '615' 'GT625' 'GT705' 'S2050' 'X2070' 'X2090' 'C2090' 'cpu' 'rocm' 'mps' 'xpu'
              return
              ;;
            --platform=*)
              compset -P '--platform='
              compadd -- 'linux' 'darwin' 'windows' 'other'
              return
              ;;
            --torch-flash=*)
              compset -P '--torch-flash='
              compadd -- 'FA2' 'FA3' 'FA4' 'other'
              return
              ;;
            --adapt=*)
              compset -P '--adapt='
              compadd -- 'auto' 'never'
              return
              ;;
            --env=*)
              compset -P '--env='
              _files
              return
              ;;
            --questions=*)
              compset -P '--questions='
              _files
              return
              ;;
            --html=*)
              compset -P '--html='
              _files
              return
              ;;
          esac
          _arguments \
            '*:environments; or folders, files, patterns of ranks' \
            '*--params[JSON of AttentionParams, of an earlier --json, or what TransformerEngine prints…]:params:_files' \
            '*--head-dim[head dimension of queries, keys and values; 192,128 where those of values differ]:head-dim' \
            '*--seqlen[longest sequence, of queries and of keys]:seqlen' \
            '*--seq-len[longest sequence, of queries and of keys]:seq-len' \
            '*--causal[the mask type\: causal or no_mask; padding_causal or padding where sequences are…]:causal' \
            '--no-causal[the mask type\: causal or no_mask; padding_causal or padding where sequences are…]' \
            '*--sliding-window[as transformers has it\: a causal query sees N keys, its own among them, which i…]:sliding-window' \
            "*--dtype[element type of q, k and v\: bf16, fp16, fp32, fp64, fp8_e4m3, fp8_e5m2]:dtype:(bf16 fp16 fp32 fp64 fp8_e4m3 fp8_e5m2)" \
            '*--qkv-layout[memory layout, or just its format\: bshd, sbhd, thd, bhsd]:qkv-layout' \
            '*--layout[memory layout, or just its format\: bshd, sbhd, thd, bhsd]:layout' \
            '*--batch-size[sequences in the batch]:batch-size' \
            '*--batch[sequences in the batch]:batch' \
            '*--num-heads[query heads]:num-heads' \
            '*--heads[query heads]:heads' \
            '*--num-attention-heads[query heads]:num-attention-heads' \
            '*--num-gqa-groups[key/value heads; as many as query heads if 0]:num-gqa-groups' \
            '*--kv-heads[key/value heads; as many as query heads if 0]:kv-heads' \
            '*--num-kv-heads[key/value heads; as many as query heads if 0]:num-kv-heads' \
            '*--num-key-value-heads[key/value heads; as many as query heads if 0]:num-key-value-heads' \
            '*--max-seqlen-q[longest query sequence]:max-seqlen-q' \
            '*--seqlen-q[longest query sequence]:seqlen-q' \
            '*--max-seqlen-kv[longest key sequence; max_seqlen_q if -1]:max-seqlen-kv' \
            '*--seqlen-kv[longest key sequence; max_seqlen_q if -1]:seqlen-kv' \
            '*--head-dim-qk[head dimension of queries and keys]:head-dim-qk' \
            '*--head-dim-v[head dimension of values; head_dim_qk if 0]:head-dim-v' \
            "*--attn-mask-type[which pairs may attend\: no_mask, padding, causal, padding_causal, causal_bottom…]:attn-mask-type:(no_mask padding causal padding_causal causal_bottom_right padding_causal_bottom_right arbitrary)" \
            "*--mask[which pairs may attend\: no_mask, padding, causal, padding_causal, causal_bottom…]:mask:(no_mask padding causal padding_causal causal_bottom_right padding_causal_bottom_right arbitrary)" \
            '*--window-size[(left, right) keys around the diagonal, inclusive; -1 is no bound; one number i…]:window-size' \
            '--bottom-right-diagonal[anchor of windows and ALiBi; decided by a causal mask type]' \
            '--no-bottom-right-diagonal[anchor of windows and ALiBi; decided by a causal mask type]' \
            "*--core-attention-bias-type[what is added to the scores\: no_bias, pre_scale_bias, post_scale_bias, alibi]:core-attention-bias-type:(no_bias pre_scale_bias post_scale_bias alibi)" \
            "*--core-attention-bias-shape[which dimensions of the bias are not 1; 1hss if there is a bias\: bhss, 1hss, b1…]:core-attention-bias-shape:(bhss 1hss b1ss 11ss 111s)" \
            '--core-attention-bias-requires-grad[the bias needs a gradient]' \
            '--no-core-attention-bias-requires-grad[the bias needs a gradient]' \
            '*--alibi-slopes-shape[(h,) or (b, h) where slopes are given; computed from the heads if None]:alibi-slopes-shape' \
            "*--softmax-type[attention sink in the denominator\: vanilla, off-by-one, learnable]:softmax-type:(vanilla off-by-one learnable)" \
            '*--softcap[softcap * tanh(score / softcap); 0 is off]:softcap' \
            '*--attention-dropout[dropout probability]:attention-dropout' \
            '*--dropout[dropout probability]:dropout' \
            '--training[a backward pass will be needed]' \
            '--inference[a backward pass will be needed]' \
            '--deterministic[bitwise equal results run after run]' \
            '--no-deterministic[bitwise equal results run after run]' \
            '--return-lse[the log-sum-exp is needed too]' \
            '--no-return-lse[the log-sum-exp is needed too]' \
            '--return-max-logit[the largest score per head is needed too]' \
            '--no-return-max-logit[the largest score per head is needed too]' \
            "*--kv-cache[keys and values live in an inference cache\: none, contiguous, paged]:kv-cache:(none contiguous paged)" \
            '*--page-size[tokens per page of a paged cache]:page-size' \
            '--pad-between-seqs[thd\: gaps between packed sequences]' \
            '--no-pad-between-seqs[thd\: gaps between packed sequences]' \
            '*--cp-size[ranks that one sequence is spread over]:cp-size' \
            "*--cp-comm-type[how context parallel ranks exchange\: p2p, all_gather, a2a, a2a+p2p]:cp-comm-type:(p2p all_gather a2a a2a+p2p)" \
            '--cuda-graph[the call is captured into a CUDA graph]' \
            '--no-cuda-graph[the call is captured into a CUDA graph]' \
            '--fp8[inside FP8 autocast; the recipe says if attention is FP8]' \
            '--no-fp8[inside FP8 autocast; the recipe says if attention is FP8]' \
            '*--mask-dtype[for plain F.sdpa\: the element type of its attn_mask, such as fp32 or bool]:mask-dtype' \
            '*--tensor-rank[for plain F.sdpa\: dimensions of q, k and v; default 4]:tensor-rank' \
            "*--fp8-recipe[attention in FP8 under this recipe\: delayed, current, mxfp8, block]:fp8-recipe:(delayed current mxfp8 block)" \
            "*--gpu[H100, H200, B200, B300, RTX 5090, GB10 and more (attnsel gpus lists them), as d…]:gpu:(V100 V10016GB V100PCIe V100PCIe16GB V100S T4 T4G A100 A10040GB A100PCIe A100PCIe40GB A10064GB A100X A800 A800PCIe A800PCIe40GB A30 A30X A2 A10 A10G A16 A40 L2 L4 L20 L40 L40S L40G H100 H100PCIe H100NVL H10096GB H10064GB H800 H800PCIe H20 H20141GB H200 H200NVL GH200 GH200144GB B100 B200 GB200 B300 GB300 QuadroGV100 TITANV TITANRTX QuadroRTX3000 QuadroRTX4000 QuadroRTX4000Laptop QuadroRTX5000 QuadroRTX6000 QuadroRTX8000 T400 T4004GB T500Laptop T550Laptop T600 T600Laptop T1000 T10008GB T1200Laptop QuadroT1000 QuadroT2000 RTXA400 RTXA500Laptop RTXA1000 RTXA1000Laptop RTXA1000Laptop6GB RTXA2000 RTXA200012GB RTXA2000Laptop RTXA2000Laptop8GB RTXA3000Laptop RTXA3000Laptop12GB RTXA4000 RTXA4000Laptop RTXA4500 RTXA4500Laptop RTXA5000 RTXA5000Laptop RTXA5500 RTXA5500Laptop RTXA6000 RTX500AdaLaptop RTX1000AdaLaptop RTX2000Ada RTX2000AdaLaptop RTX3000AdaLaptop RTX3500AdaLaptop RTX4000Ada RTX4000SFFAda RTX4000AdaLaptop RTX4500Ada RTX5000Ada RTX5000AdaLaptop RTX5880Ada RTX6000Ada RTXPRO500Laptop RTXPRO1000Laptop RTXPRO2000 RTXPRO2000Laptop RTXPRO3000Laptop RTXPRO4000 RTXPRO4000SFF RTXPRO4000Laptop RTXPRO4500 RTXPRO5000 RTXPRO500072GB RTXPRO5000Laptop RTXPRO6000 RTXPRO6000Max-Q RTXPRO4500Server RTXPRO6000Server GB10 GTX1630 GTX1650 GTX1650Laptop GTX1650TiLaptop GTX1650SUPER GTX1660 GTX1660SUPER GTX1660Ti MX450 MX550 RTX2060 RTX206012GB RTX2060SUPER RTX2070 RTX2070SUPER RTX2080 RTX2080SUPER RTX2080Ti MX570 RTX2050Laptop RTX3050 RTX30506GB RTX3050Laptop RTX3050Laptop6GB RTX3050TiLaptop RTX3060 RTX30608GB RTX3060Laptop RTX3060Ti RTX3070 RTX3070Laptop RTX3070Ti RTX3070TiLaptop RTX3080 RTX308012GB RTX3080Laptop RTX3080Laptop16GB RTX3080Ti RTX3080TiLaptop RTX3090 RTX3090Ti RTX4050Laptop RTX4060 RTX4060Laptop RTX4060Ti RTX4060Ti16GB RTX4070 RTX4070Laptop RTX4070SUPER RTX4070Ti RTX4070TiSUPER RTX4080 RTX4080Laptop RTX4080SUPER RTX4090 RTX4090D RTX4090Laptop RTX5050 RTX5050Laptop RTX5060 RTX5060Laptop RTX5060Ti RTX5060Ti8GB RTX5070 RTX5070Laptop RTX5070Ti RTX5070TiLaptop RTX5080 RTX5080Laptop RTX5090 RTX5090D RTX5090DV2 RTX5090Laptop Xavier AGXXavier AGXXavier64GB AGXXavier16GB XavierNX XavierNX16GB Orin AGXOrin AGXOrin32GB OrinNX OrinNX8GB OrinNano OrinNano4GB Thor JetsonT5000 JetsonT4000 A80040GB AX800 A10M H800NVL T400E RTXA4000H RTXA500Embedded RTXA1000Embedded RTXA2000Embedded RTXA4500Embedded RTX2000EAda RTX2000AdaEmbedded RTX3500AdaEmbedded RTX5000AdaEmbedded RTX6000D RTXPRO500Embedded RTXPRO2000Embedded RTXPRO4000Embedded RTXPRO5000Embedded MX570A RTX3050OEM RTX3050ALaptop CMP100HX CMP30HX CMP40HX CMP50HX CMP170HX CMP170HX10GB CMP70HX CMP90HX P100 P100PCIe P100PCIe12GB P40 P4 P6 M60 M40 M10 QuadroGP100 QuadroP6000 QuadroP5000 QuadroP5200 QuadroP4200 QuadroP4000 QuadroP3200 QuadroP3000 QuadroP2200 QuadroP2000 QuadroP1000 QuadroP620 QuadroP600 QuadroP520 QuadroP500 QuadroP400 QuadroM6000 QuadroM600024GB QuadroM5000 QuadroM5500 QuadroM4000 QuadroM2000 QuadroM2200 QuadroM5000M QuadroM4000M QuadroM3000M QuadroK2200 QuadroK1200 QuadroK620 QuadroM1200 QuadroM620 QuadroM2000M QuadroM1000M QuadroM600M QuadroM520 NVS810 TITANXp TITANX GTX1080Ti GTX1080 GTX1070Ti GTX1070 GTX1060 GTX10603GB GTX10605GB GTX1050Ti GTX1050 GTX10503GB GT1030 GTX1080Laptop GTX1070Laptop GTX1060Laptop GTX1060Laptop3GB GTX1050TiLaptop GTX1050Laptop GTX1050Laptop2GB MX350 MX330 MX250 MX230 MX150 GTXTITANX GTX980Ti GTX980 GTX970 GTX960 GTX950 GTX980M GTX970M GTX965M GTX750Ti GTX750 GTX745 GTX960M GTX950M GTX850M GTX860M GeForce940MX GeForce930MX MX130 MX110 Rubin K80 TeslaM4 TeslaM6 QuadroP5000Laptop QuadroP4000Laptop QuadroP2000Laptop QuadroP1000Laptop QuadroP620Laptop QuadroP600Laptop QuadroM3000SE QuadroM500M QuadroK2200M QuadroK620M 830M GeForce840M 845M 920MX 945M 830A 840A GTX850A 930A 940A 945A GTX950A GTX960A GTX980MX GTX980Laptop GT1010 P102-100 P102-101 P104-100 P104-101 P106-100 P106-090 P106M TITANVCEOEdition T10 P10 PG500-216 PG503-216 PG506-207 PG506-217 PG506-242 RTX4010 MI355X MI350X MI325X MI300X MI300A MI308X MI250X MI250 MI210 MI200 MI100 MI60 MI50 MI25 MI8 MI6 AIPROR9700S AIPROR9700 AIPROR9600D PROW7900 PROW7800 PROW780048GB PROW7700 PROV710 PROW7600 PROW7500 PROW6800 PROV620 PROW6900X PROW6800X PROW6800XDuo PROW6600 PROW6400 PROW6500M PROW6300 PROW6600M PROW6600X PROW5700 PROW5700X PROV520 PROW5500 PROVII PROVegaII PROVegaIIDuo PROWX9100 PROWX8200 PROV340 VegaFrontierEdition PROWX7100 PROWX5100 PROWX4100 RX9070XT RX9070 RX9070GRE RX9060XT RX9060XT8GB RX9060 RX7900XTX RX7900XT RX7900GRE RX7900M RX7800XT RX7700XT RX7700 RX7800M RX7600XT RX7600 RX7650GRE RX7400 RX7700S RX7600MXT RX7600M RX7600S RX6950XT RX6900XT RX6800XT RX6800 RX6750XT RX6700XT RX6700 RX6750GRE RX6850MXT RX6800M RX6700M RX6650XT RX6600XT RX6600 RX6600M RX6650M RX6650MXT RX6800S RX6700S RX6600S RX6500XT RX6500XT8GB RX6400 RX6500M RX6300M RX5700XT RX5700 RX5600XT RX5600 RX5600M RX5700M RX5500XT RX5500 RX5500M RX5300 RX5300M RadeonVII RXVega64 RXVega56 RX590 RX580 RX570 RX560 RX480 RX470 RX460 R9Nano R9Fury R9FuryX 8060S 8050S 8040S 8065S 890M 880M 860M 840M 820M 780M 760M 740M 680M 660M 610M SteamDeck Vega8 Vega7 Vega6 RadeonGraphics ArcProB70 ArcProB65 ArcProB60 ArcProB50 ArcB580 ArcB570 ArcA770 ArcA7708GB ArcA750 ArcA580 ArcA380 ArcA310 ArcProA60 ArcProA60M ArcProA50 ArcProA40 ArcProA30M ArcA770M ArcA730M ArcA570M ArcA550M ArcA530M ArcA370M ArcA350M ArcB390 ArcB370 Arc140V Arc130V Arc140T Arc130T ArcGraphics IrisXe UHD770 UHD750 UHD730 IrisPlus UHD630 UHD620 UHDGraphics IntelGraphics DataCenterGPUMax1550 DataCenterGPUMax1450 DataCenterGPUMax1350 DataCenterGPUMax1100 DataCenterGPUMax Flex170 Flex140 Flex Arc M1 M1Pro M1Max M1Ultra M2 M2Pro M2Max M2Ultra M3 M3Pro M3Max M3Ultra M4 M4Pro M4Max M5 M5Pro M5Max M5Ultra Applesilicon JetsonTX2 JetsonTX2NX JetsonNano JetsonNano2GB JetsonTX1 710A 710M GT720M GT730 GT710 GT730M K20c K20X K20Xm GT735M GT740A GTX780 GTX780Ti GTXTITAN QuadroK510M QuadroK6000 QuadroK610M K20m K20 K40c K40m K40 805A 810A 825M GT720 GT730A GTXTITANBlack GTXTITANZ QuadroK5200 910M 920A 920M JetsonTK1 GT640MLE GeForce820M 810M GT640 GT640M GT645M GT650M GTX650 GTX650Ti GTX660 GTX660Ti GTX660M GTX670 GTX670MX GTX675MX GTX680 GTX680M GTX690 NVS510 Quadro410 QuadroK1000M QuadroK2000M QuadroK3000M QuadroK4000M QuadroK5000 QuadroK5000M QuadroK500M K10 GT740M GT745A GT745M GT750M GT755M GTX650TiBoost GTX760 GTX760M GTX765M GTX770 GTX770M GTX780M K1 K100 K2 K200 K340 K520 QuadroK1100M QuadroK2000 QuadroK2000D QuadroK2100M QuadroK3100M QuadroK4000 QuadroK4100M QuadroK5100M QuadroK600 GT740 GTX760A GTX870M GTX880M K500 QuadroK100M QuadroK200M QuadroK420 QuadroK4200 K8 GT415M GT420M GT425M GT430 GT435M GT445M GTS450 GTX460 GTX460SE GTX460M GTX470M Quadro2000 Quadro600 410M 610 GeForce610M GT440 GT520 GT520M GT520MX GT525M GT540M GT545 GT550M GT555M GTX485M GTX550Ti GTX560 GTX560Ti GTX560M GTX570M GTX580M NVS4200M Quadro1000M Quadro2000D Quadro2000M Quadro3000M Quadro4000M Quadro500M 620M GT610 GT620 GT620M GT625M GT630 GT630M GT635M GTX560SE GTX670M GTX675M NVS310 NVS5200M NVS5400M 705A 705M GT710M NVS315 720A 800A 800M 820A GT720A GTX465 GTX470 GTX480 GTX480M GTX570 GTX580 Quadro4000 Quadro5000M Quadro6000 GTX560Ti448 GTX590 Quadro5000 Quadro5010M C2050 C2070 C2075 M2050 M2070 M2075 M2090 Quadro7000 GT645 GTX645 GTX760Ti GTX680MX GTX775M GT635 GT420 510 GT530 GTX555 605 615 GT625 GT705 S2050 X2070 X2090 C2090 cpu rocm mps xpu)" \
            '*--torch[version of torch, or none where it is not installed]:torch' \
            '*--triton[version of triton, or none where it is not installed]:triton' \
            '*--cudnn[version of cudnn, or none where it is not installed]:cudnn' \
            '*--cudnn-frontend[version of cudnn-frontend, or none where it is not installed]:cudnn-frontend' \
            '*--cuda[version of cuda, or none where it is not installed]:cuda' \
            '*--python[version of python, or none where it is not installed]:python' \
            '*--flash-attn[version of flash-attn, or none where it is not installed]:flash-attn' \
            '*--flash-attn-3[version of flash-attn-3, or none where it is not installed]:flash-attn-3' \
            '*--flash-attn-4[version of flash-attn-4, or none where it is not installed]:flash-attn-4' \
            '*--transformer-engine[version of transformer-engine, or none where it is not installed]:transformer-engine' \
            "*--platform[linux, darwin, windows, other]:platform:(linux darwin windows other)" \
            "*--torch-flash[what answers torch's own flash attention\: activate_flash_attention_impl\: FA2, F…]:torch-flash:(FA2 FA3 FA4 other)" \
            '*--missing[libraries that are not there, or do not load\: libnvrtc, libcudnn]:missing' \
            '*--backend[run this candidate or raise with its reasons; never another]:backend' \
            '*--allow[only these candidates, in this order of preference; commas between]:allow' \
            '*--deny[never these candidates; commas between]:deny' \
            "*--adapt[whether a call may be changed exactly (a mask folded, a copy made)\: auto, never]:adapt:(auto never)" \
            '*--allow-known-bugs[BUG codes to ignore, for those who know their build is patched; commas between]:allow-known-bugs' \
            '--preview[let rules refuse that are still tried out]' \
            '--no-preview[let rules refuse that are still tried out]' \
            '*--memory-limit[most memory, such as 2GiB, that a call may take for scores, masks, copies and t…]:memory-limit' \
            '*--figures[a file of explain --measure\: what was measured here goes before what was publis…]:figures' \
            '*--stride[q=S0,S1,S2,S3\: steps in elements, in the layout'\''s order, 0 for expanded; also k…]:stride' \
            '*--misaligned[q,k,v,mask\: tensors that begin one element off a 16-byte boundary; q=4\: at 4 by…]:misaligned' \
            '*--env[JSON of doctor --json, of an earlier --json or of Environment; - reads standard…]:env:_files' \
            '*--model[ask about a whole model, as explain --model does]:model' \
            '*--questions[ask what a file holds\: lines of ATTNSEL_DEBUG_FORMAT=json or of attnsel watch -…]:questions:_files' \
            '*--tp-size[with --model\: ranks that share its heads]:tp-size' \
            '*--as[what this library would choose by itself, and why\: torch, te, transformers]:as' \
            '*--switch[with --as\: something of the library'\''s that is set, as NAME=VALUE, such as NVTE_…]:switch' \
            '--markdown[print Markdown, for an issue]' \
            '--json[print JSON instead of text]' \
            '*--html[also write the answer as a page with pictures, which needs no network; - prints…]:html:_files' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        check)
          case ${words[CURRENT]} in
            --questions=*)
              compset -P '--questions='
              _files
              return
              ;;
            --junit=*)
              compset -P '--junit='
              _files
              return
              ;;
          esac
          _arguments \
            '1:the baseline, such as attention.json:_files' \
            '--update[write what holds now as what is expected]' \
            '*--upgrade[ask with these in every environment\: torch=2.15,cudnn=9.13; --update keeps them]:upgrade' \
            '*--env[with --update\: an environment more, as of explain --env; any number of times]:env' \
            '*--model[with --update\: a model more, as of explain --model; any number of times]:model' \
            '*--questions[with --update\: the questions of a file more, as of compare --questions]:questions:_files' \
            '--github[also an annotation for each failure, for a GitHub workflow]' \
            '*--junit[also a JUnit XML file, a test for each question]:junit:_files' \
            '--markdown[print Markdown, for an issue]' \
            '--json[print JSON instead of text]' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        rules)
          _arguments \
            '*--candidate[Only rules about this candidate.]:candidate' \
            '*--family[Only codes that begin so, such as BUG or CUDNN.]:family' \
            '*--evidence[Only rules that rest on this, such as library or source.]:evidence' \
            '--ranges[Instead of rules\: which codes lie in which file, and the next free one of each …]' \
            '--markdown[print Markdown, for an issue]' \
            '--json[print JSON instead of text]' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        rule)
          _arguments \
            '1:such as CUDNN204; case does not matter' \
            '--markdown[print Markdown, for an issue]' \
            '--json[print JSON instead of text]' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        gpus)
          _arguments \
            '*:only those with all of these\: H100, sm89, laptop' \
            '--markdown[print Markdown, for an issue]' \
            '--json[print JSON instead of text]' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        prove)
          case ${words[CURRENT]} in
            --out=*)
              compset -P '--out='
              _files
              return
              ;;
            --device=*)
              compset -P '--device='
              compadd -- 'cuda' 'cpu'
              return
              ;;
          esac
          _arguments \
            '*--out[the file; gpu-NAME.json in the current folder if left out]:out:_files' \
            '*--budget[seconds in all]:budget' \
            "*--device[cpu\: a rehearsal on Triton's interpreter, which proves nothing]:device:(cuda cpu)" \
            '*--only[tests with one of these words in their name, by commas]:only' \
            '*--jobs[test processes; as many as cores and the card'\''s memory allow]:jobs' \
            '--quick[few cases of the benchmark]' \
            '*--kind[benchmark\: forward, backward, decode; all if left out]:kind' \
            '*--kernel[benchmark\: candidates beside sdpa.flash; all if left out]:kernel' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        run)
          _arguments \
            '1:a script, a folder with a __main__.py, or with -m a module' \
            '*:the program'\''s own' \
            '-m[a module, not a file]' \
            '--module[a module, not a file]' \
            '--force[also over a flash_attn that works here]' \
            '--flash-attn[beside --sdpa\: take the name flash_attn as well]' \
            '--sdpa[put attnsel in place of torch.nn.functional.scaled_dot_product_attention instead]' \
            '--transformers[also register attn_implementation=\"attnsel\" with transformers, and let \"flash_a…]' \
            '-q[do not say what is done]' \
            '--quiet[do not say what is done]' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        replay)
          _arguments \
            '1:a file of ATTNSEL_REPLAY_DIR:_files' \
            '*--backend[call this candidate instead of the one the file is about]:backend' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        watch)
          _arguments \
            '1:a script, a folder with a __main__.py, or with -m a module' \
            '*:the program'\''s own' \
            '-m[a module, not a file]' \
            '--module[a module, not a file]' \
            '*--gpu[what would it run on this GPU (attnsel gpus); this machine if left out]:gpu' \
            '--time[also measure time, beside an estimate]' \
            '--memory[also measure memory, beside an estimate]' \
            '*--out[a folder for one file per process\: attnsel compare reads it]:out' \
            '*--output[write the report to this file, not to standard error]:output' \
            '--live[a table that grows while it runs]' \
            '--markdown[print Markdown, for an issue]' \
            '--json[print JSON instead of text]' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        doctor)
          _arguments \
            '--markdown[print Markdown, for an issue]' \
            '--json[print JSON instead of text]' \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
        completion)
          _arguments \
            "1:the shell that reads it:(bash zsh fish)" \
            '--help[Display this message and exit.]' \
            '-h[Display this message and exit.]' \
            '--version[Display application version.]'

          ;;
      esac
      ;;
  esac
}


